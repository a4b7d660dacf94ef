"""Progress of a run: lines of text without a terminal, a live view on a terminal."""

import io
import sys
from types import SimpleNamespace

import pytest

from lmtrain.runtime import progress
from lmtrain.tracking.console import Console, Evaluated, Shown

SHOWN = Shown(step=1, loss=3.14159, learning_rate=6e-4, tokens_per_second=123_456.7, seconds_per_step=0.25)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A stopped clock: only required lines are printed."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 1000.0))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """`on_terminal()` makes stderr, which pytest replaces for each test, a terminal; returns the text sent to it."""

    def begin(kind: str = "xterm") -> Terminal:
        file = Terminal()
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setenv("TERM", kind)
        return file

    return begin


def changed(**values) -> Shown:
    return Shown(**SHOWN.__dict__ | values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "train 1/1000, loss 3.142, lr 6.00e-04, 123,457 tokens/s"),
        ({"mfu": 41.23}, "train 1/1000, loss 3.142, lr 6.00e-04, 123,457 tokens/s, MFU 41.2 %"),
        (
            {"mfu": 0.0, "evaluated": Evaluated(1, 3.2), "status": "cache 41 of 150 shards"},
            "train 1/1000, loss 3.142, eval 3.200, lr 6.00e-04, 123,457 tokens/s, MFU 0.0 %, cache 41 of 150 shards",
        ),
        ({"loss": float("nan")}, "train 1/1000, loss nan, lr 6.00e-04, 123,457 tokens/s"),
        ({"next_evaluation": 5, "next_save": 7}, "train 1/1000, loss 3.142, lr 6.00e-04, 123,457 tokens/s"),
    ],
)
def test_without_a_terminal_a_line_has_all_known_values(capsys, values, line):
    with Console("one", 1000, 0, is_first=True) as console:
        console.show(changed(**values))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].removesuffix(", 4m10s left") == line  # 999 steps of 0.25 s
    assert len(err.splitlines()) == 1


def test_the_first_and_the_last_step_have_a_line_and_an_evaluation_is_in_the_next_line(capsys):
    with Console("one", 4, 0, is_first=True) as console:
        for step in range(1, 5):
            console.show(changed(step=step, evaluated=Evaluated(2, 3.5) if step > 2 else None))
            console.show_evaluation(Evaluated(step, 2.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["train 1/4", "train 4/4"]
    assert ["eval 3.500" in line for line in lines] == [False, True]


def test_a_line_is_printed_every_few_seconds_with_the_time_left_at_the_speed_of_the_last_steps(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Console("one", 100, 10, is_first=True) as console:
        now[0] += 60  # compilation
        for step in range(11, 31):
            now[0] += 1
            console.show(changed(step=step, seconds_per_step=2.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["train 11/100", "train 16/100", "train 21/100", "train 26/100"]
    assert lines[0].endswith(", 2m58s left")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_other_processes_of_a_run_are_quiet(capsys, on_terminal, terminal):
    file = on_terminal() if terminal else io.StringIO()
    with Console("one", 2, 0, is_first=False) as console:
        console.show(changed(step=1))
        console.show_evaluation(Evaluated(1, 3.0))
        console.show(changed(step=2))
    assert (file.getvalue(), *capsys.readouterr()) == ("", "", "")


def test_on_a_terminal_there_is_a_view_with_earlier_losses_and_no_lines(on_terminal):
    terminal = on_terminal()
    with Console("one  gpt2", 1000, 8, is_first=True, losses=[8, 7, 6, 5, 4, 3, 2]) as console:
        console.show_evaluation(Evaluated(5, 9.9))  # before the first step there is no view to show it in
        console.show(changed(step=9, loss=1.0))
        console.show_evaluation(Evaluated(9, 2.71828))  # at once
    sent = terminal.getvalue()
    for part in ("one  gpt2", "9/1,000", "███▇▅▄▂▁", "2.7183  after step 9"):
        assert part in sent
    assert "train " not in sent
    assert "9.9" not in sent


@pytest.mark.parametrize("where", ["lines", "view"])
def test_it_closes_properly_after_any_error(on_terminal, where):
    if where == "view":
        on_terminal()
    before = sys.stderr, sys.stdout

    def run():
        with Console("one", 10, 0, is_first=True) as console:
            console.show(SHOWN)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (sys.stderr, sys.stdout) == before


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_without_cursor_movement_has_lines(on_terminal, name):
    """A live view would show nothing on it until the end."""
    terminal = on_terminal(name)
    with Console("one", 10, 0, is_first=True) as console:
        console.show(SHOWN)
    assert terminal.getvalue().splitlines() == ["train 1/10, loss 3.142, lr 6.00e-04, 123,457 tokens/s, 2s left"]


def test_an_evaluation_before_the_first_step_of_a_resumed_run_names_its_step(capsys):
    with Console("a run", 30, 6, is_first=True) as console:
        console.evaluating(1, 300, "batches")
    assert "6/30, evaluating, 1 of 300 batches" in capsys.readouterr().err
