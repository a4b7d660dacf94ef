"""The goodput ledger of a run's wall time, with clocks that the test controls."""

import contextlib
import json
import logging
import os

import pytest

from lmtrain.tracking.goodput import (
    COMPILE,
    DATA,
    DOWN,
    EVALUATION,
    HOOKS,
    KINDS,
    LOST,
    NAME,
    RESTORE,
    SAVING,
    SECTIONS,
    START_UP,
    STEPS,
    Ledger,
    Timer,
    read_attempts,
    total_seconds,
)


class Clocks:
    """Both clocks of a ledger; `turn` advances them."""

    def __init__(self):
        self.now = 1_000_000.0

    def turn(self, seconds):
        self.now += seconds

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now - 999_000.0

    def ledger(self, folder, began=None):
        """Return a ledger with the timer of the last start."""
        self.timer = Timer(self.monotonic)
        return Ledger(None if folder is None else str(folder), self.timer, began, self.wall)


@pytest.fixture
def clocks():
    return Clocks()


def seconds(folder):
    """Seconds of the run so far, by kind, without those that are zero."""
    return {kind: value for kind, value in total_seconds(read_attempts(str(folder / NAME))).items() if value}


def run(clocks, folder, first, steps):
    """A start with 5 s of start-up and 1 s per step; killed 10 s after it last wrote its ledger."""
    ledger = clocks.ledger(folder)
    clocks.turn(5)
    ledger.begin_steps(first, {})
    for step in range(first + 1, first + steps + 1):
        clocks.turn(1)
        ledger.step_done(step)
    ledger.write()
    clocks.turn(10)


def test_kinds_add_up_to_the_wall_time(clocks, tmp_path):
    began = clocks.wall() - 3  # time before the ledger is start-up
    ledger = clocks.ledger(tmp_path, began)
    clocks.turn(4)
    with clocks.timer.section(RESTORE):
        clocks.turn(20)
    clocks.turn(1)
    ledger.begin_steps(0, {})
    with clocks.timer.section(COMPILE):
        clocks.turn(30)
    for step in range(1, 4):
        with clocks.timer.section(DATA):
            clocks.turn(0.5)
        clocks.turn(2)
        ledger.step_done(step)
    with clocks.timer.section(EVALUATION):
        clocks.turn(7)
    with clocks.timer.section(SAVING):
        clocks.turn(0.25)
    with clocks.timer.section(HOOKS):  # counts as steps
        clocks.turn(1)
    ledger.write()
    assert seconds(tmp_path) == {
        START_UP: 8,
        RESTORE: 20,
        COMPILE: 30,
        DATA: 1.5,
        STEPS: 7,
        EVALUATION: 7,
        SAVING: 0.25,
    }
    assert sum(seconds(tmp_path).values()) == clocks.wall() - began


def test_all_time_belongs_to_one_section():
    """A nested section counts for the outer one, also up to an error."""
    now = [1000.0]

    def turn(seconds):
        now[0] += seconds

    timer = Timer(lambda: now[0])
    turn(3)
    timer.begin_steps()
    with contextlib.suppress(KeyError), timer.section(SAVING):
        turn(1)
        with timer.section(EVALUATION):
            turn(2)
        with timer.section(SAVING):
            turn(4)
        assert timer.seconds[SAVING] == 7  # nothing is counted twice
        turn(8)
        raise KeyError
    turn(16)
    assert timer.seconds == dict.fromkeys(SECTIONS, 0.0) | {START_UP: 3, SAVING: 15, STEPS: 16}


def test_all_fractions_are_present_and_sum_to_one(clocks, tmp_path):
    run(clocks, tmp_path, 0, 30)
    clocks.turn(100)
    ledger = clocks.ledger(tmp_path)
    clocks.turn(7)
    ledger.begin_steps(20, {})
    clocks.turn(13)
    metrics = ledger.metrics()
    assert set(metrics) == {f"goodput/{kind}" for kind in (*KINDS, LOST, DOWN)}
    assert sum(metrics.values()) == pytest.approx(1)
    assert metrics["goodput/lost"] == pytest.approx(10 / (5 + 30 + 110 + 7 + 13))


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, 40), (40, 5)], {START_UP: 10, STEPS: 45, DOWN: 10}),  # from the last step
        ([(0, 40), (30, 20)], {START_UP: 10, STEPS: 30 + 20, LOST: 10, DOWN: 10}),
        # one is killed before its first step
        ([(0, 40), (30, 0), (30, 20), (45, 5)], {START_UP: 20, STEPS: 55 - 5, LOST: 10 + 5, DOWN: 30}),
        # the second resumes from the end of the first; then only one checkpoint of both is left
        ([(0, 40), (40, 10), (10, 1)], {START_UP: 15, STEPS: 10 + 0 + 1, LOST: 30 + 10, DOWN: 20}),
    ],
)
def test_steps_repeated_after_a_restart_are_lost_once(clocks, tmp_path, starts, expected):
    for first, steps in starts:
        run(clocks, tmp_path, first, steps)
    assert seconds(tmp_path) == expected


def test_the_time_since_the_last_update_of_a_start_until_the_next_is_down(clocks, tmp_path):
    run(clocks, tmp_path, 0, 3)
    clocks.turn(990)
    began = clocks.wall()
    clocks.turn(50)  # start-up of the interpreter, before the ledger
    clocks.ledger(tmp_path, began).begin_steps(3, {})
    assert seconds(tmp_path) == {START_UP: 5 + 50, STEPS: 3, DOWN: 1000}


def test_a_killed_start_is_recorded_up_to_its_last_write(clocks, tmp_path):
    ledger = clocks.ledger(tmp_path)
    assert not (tmp_path / NAME).exists()
    clocks.turn(5)
    ledger.begin_steps(70, {"host": "a"})
    (attempt,) = read_attempts(str(tmp_path / NAME))
    assert (attempt.first_step, attempt.last_step, attempt.facts) == (70, 70, {"host": "a"})
    assert attempt.seconds == {**dict.fromkeys(KINDS, 0.0), START_UP: 5}
    with_metrics = []
    for step in range(71, 96):  # writes after 10 and 20 seconds
        clocks.turn(1)
        if ledger.step_done(step):
            with_metrics.append(step)
    assert with_metrics == [80, 90]
    assert os.listdir(tmp_path) == [NAME]
    (attempt,) = json.loads((tmp_path / NAME).read_text())["attempts"]  # plain JSON, for other programs
    assert (attempt["first_step"], attempt["last_step"], attempt["facts"]) == (70, 90, {"host": "a"})
    assert (attempt["started"], attempt["updated"]) == (1_000_000.0, 1_000_025.0)
    assert sum(attempt["seconds"].values()) == 25


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"null", b'{"attempts": [{"started": 1}]}', b"\xff\x00", "truncated"),
        b'{"attempts": [{"started":1,"updated":1,"first_step":0,"last_step":0,"seconds":null,"facts":{}}]}',
    ],
)
def test_a_corrupt_ledger_is_not_an_error_and_is_replaced(clocks, tmp_path, damaged):
    if damaged == "truncated":
        run(clocks, tmp_path, 0, 3)
        damaged = (tmp_path / NAME).read_bytes()[:-100]
    (tmp_path / NAME).write_bytes(damaged)
    assert read_attempts(str(tmp_path / NAME)) == []
    run(clocks, tmp_path, 0, 3)
    assert seconds(tmp_path) == {START_UP: 5, STEPS: 3}


def test_a_folder_that_cannot_be_written_is_logged_once_and_timing_continues(clocks, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "lmtrain"):
        ledger = clocks.ledger(tmp_path / "file")
        ledger.begin_steps(0, {})
        clocks.turn(10)
        assert ledger.step_done(1)["goodput/steps"] == 1
        ledger.write()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{tmp_path}/file/{NAME} cannot be written")
