"""SIGTERM, SIGINT and SIGUSR1 at any moment, to a single process or one of two: saved, exit code 75, nothing lost."""

import contextlib
import random
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import tiny_settings
from faults.runs import (
    RUN,
    complete_steps,
    differences,
    finish,
    full_settings,
    metrics,
    resumed_from,
    run_folder,
    running,
    running_two,
    trained_steps,
    wait_for,
    write_config,
)

pytestmark = pytest.mark.end_to_end

STEPS = 300
STEPS_OF_TWO = 60
STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# When a signal is sent; each but the first is followed by a random delay.
HANDLERS = "handlers"  # as soon as it catches signals: seconds before its first step
MOMENTS = ("start-up", "save", "step")
DEADLINE_SECONDS = 300


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, full_settings(STEPS))
    finish(folder)
    return folder


def catches_signals(process):
    """Whether it has installed its handlers: before, a signal ends it immediately, and there is nothing to save."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return all(caught >> (number - 1) & 1 for number in SIGNALS)


def newest(folder):
    return max(complete_steps(folder), default=0)


def last_logged(folder):
    """The last step in the log; 0 while there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: the last line is being written
        return max(trained_steps(folder), default=0)
    return 0


def is_saving(folder):
    return any(not (mark.with_suffix("") / "manifest.json").exists() for mark in marks(folder))


def marks(folder):
    return list(run_folder(folder).glob("step-*.partial"))


def wait_until(moment, folder, processes, logged, dice):
    """Wait for the moment and a random time. `logged`: the last step that was logged before the start."""
    for process in processes:
        wait_for(lambda process=process: catches_signals(process), processes)
    if moment == HANDLERS:
        return
    if moment == "start-up":
        time.sleep(dice.uniform(0, 3))
        return
    steps = dice.randint(1, 6)  # steps rather than seconds, in which a fast machine could finish
    wait_for(lambda: last_logged(folder) >= logged + steps, processes)
    if moment == "save":
        wait_for(lambda: is_saving(folder), processes)
        time.sleep(dice.uniform(0, 0.1))


def check_stopped(folder, output, code, from_step):
    """Check a run that resumed from `from_step` and was ended by a signal."""
    assert code == STOPPED, output
    assert resumed_from(output) in (from_step, None)
    assert newest(folder) == last_logged(folder), output
    assert marks(folder) == []


@pytest.mark.long
def test_stopped_at_random_moments_a_run_saves_its_last_step_and_ends_with_the_same_bytes(undisturbed, tmp_path):
    dice = random.Random(0)
    write_config(tmp_path, full_settings(STEPS))
    for attempt in range(7):
        moment, number, before = MOMENTS[attempt % 3], dice.choice(SIGNALS), newest(tmp_path)
        with running(tmp_path) as process:
            wait_until(moment, tmp_path, [process], before, dice)
            process.send_signal(number)
            code = process.wait(timeout=DEADLINE_SECONDS)
        check_stopped(tmp_path, (tmp_path / "output.txt").read_text(), code, before)
    before = newest(tmp_path)
    assert 0 < before < STEPS
    assert resumed_from(finish(tmp_path)) == before
    assert differences(tmp_path, undisturbed, STEPS) == []


def signal_twice(folder, moment, dice, delay=0.0):
    """Start it and send two different signals, the second `delay` after the first was logged. -> the output"""
    with running(folder) as process:
        wait_until(moment, folder, [process], last_logged(folder), dice)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "send it again to exit immediately" in (folder / "output.txt").read_text(), [process])
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=DEADLINE_SECONDS)
    output = (folder / "output.txt").read_text()
    assert code == STOPPED, output
    return output


@pytest.mark.long
def test_a_second_signal_exits_immediately_and_the_next_start_resumes_from_a_complete_checkpoint(undisturbed, tmp_path):
    write_config(tmp_path, full_settings(STEPS))
    dice = random.Random(0)
    output = signal_twice(tmp_path, HANDLERS, dice)
    assert "stopped" not in output
    assert complete_steps(tmp_path) == []
    signal_twice(tmp_path, "save", dice, delay=dice.uniform(0, 0.02))
    before = newest(tmp_path)
    assert resumed_from(finish(tmp_path)) == before
    assert differences(tmp_path, undisturbed, STEPS) == []


@pytest.fixture(scope="module")
def settings_of_two(undisturbed):
    settings = tiny_settings()
    settings["data"]["cache_dir"] = str(undisturbed / "cache")
    settings["model"] |= {"resid_pdrop": 0.1}
    settings["trainer"] |= {"num_train_steps": STEPS_OF_TWO, "steps_per_eval": 50}
    return settings


@pytest.fixture(scope="module")
def undisturbed_two(settings_of_two, tmp_path_factory):
    """The metrics of a run of two processes that saves only at its end."""
    folder = tmp_path_factory.mktemp("two")
    settings_of_two["trainer"]["checkpointer"] = {"save_interval": None, "keep": []}
    write_config(folder, settings_of_two)
    finish_two(folder, "alone")
    assert complete_steps(folder) == [STEPS_OF_TWO]
    return metrics(folder)


def finish_two(folder, attempt):
    with running_two(folder, attempt=attempt) as processes:
        codes = [process.wait(timeout=DEADLINE_SECONDS) for process in processes]
    assert codes == [0, 0], [(folder / f"{attempt}.{number}.txt").read_text() for number in range(2)]


def saved_steps(folder, log):
    """The steps that a process has saved, in order."""
    return [int(step) for step in re.findall(r"saved \S*/step-(\d+)", (folder / "logs" / log).read_text())]


@pytest.mark.long
def test_two_processes_stop_and_save_together_after_a_signal_to_either_and_resume_with_the_same_losses(
    settings_of_two, undisturbed_two, tmp_path
):
    dice = random.Random(0)
    settings_of_two["trainer"]["checkpointer"] = {"save_interval": "1s", "keep": []}
    write_config(tmp_path, settings_of_two)
    for victim, number in ((0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGUSR1)):
        attempt, before = f"{victim}-{number.name}", newest(tmp_path)
        with running_two(tmp_path, attempt=attempt) as processes:
            wait_until("step", tmp_path, processes, before, dice)
            processes[victim].send_signal(number)
            codes = [process.wait(timeout=DEADLINE_SECONDS) for process in processes]
        output = [(tmp_path / f"{attempt}.{process}.txt").read_text() for process in range(2)]
        assert codes == [STOPPED, STOPPED], output
        check_stopped(tmp_path, output[0], codes[0], before)
        assert newest(tmp_path) > before
    stopped_at = newest(tmp_path)
    finish_two(tmp_path, "end")
    assert metrics(tmp_path) == undisturbed_two
    saves = saved_steps(tmp_path, f"{RUN}.log")
    assert saves == saved_steps(tmp_path, f"{RUN}.process-1.log")
    assert [
        step for step in saves if stopped_at < step < STEPS_OF_TWO
    ]  # saves of `save_interval`, by the clock of the first process
