"""Progress of a run: lines of text without a terminal, a live view on a terminal."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import rich.console

from lmtrain.runtime import progress
from lmtrain.runtime.logging import log, logging_restored, start_console_log
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
        (
            {"mfu": 0.0, "evaluated": Evaluated(1, 3.2), "status": "cache 41 of 150 shards"},
            "train 1/1000, loss 3.142, eval 3.200, lr 6.00e-04, 123,457 tokens/s, MFU 0.0 %, cache 41 of 150 shards",
        ),
        ({"loss": float("nan")}, "train 1/1000, loss nan, lr 6.00e-04, 123,457 tokens/s"),
    ],
)
def test_without_a_terminal_a_line_has_all_known_values(capsys, values, line):
    with Console(1000, 0, is_first=True) as console:
        console.show(changed(**values))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].removesuffix(", 4m10s left") == line  # 999 steps of 0.25 s
    assert len(err.splitlines()) == 1


def test_the_first_and_the_last_step_have_a_line_and_an_evaluation_is_in_the_next_line(capsys):
    with Console(4, 0, is_first=False) as console:  # the other processes of a run are quiet
        console.show(changed(step=1))
    with Console(4, 0, is_first=True) as console:
        for step in range(1, 5):
            console.show(changed(step=step, evaluated=Evaluated(2, 3.5) if step > 2 else None))
            console.show_evaluation(Evaluated(step, 2.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["train 1/4", "train 4/4"]
    assert ["eval 3.500" in line for line in lines] == [False, True]


def as_text(console, width=120):
    """The lines that are drawn, without the bar."""
    shown = rich.console.Console(record=True, width=width, file=io.StringIO())
    shown.print(console.drawn())
    return [line.removeprefix("train").strip(" ━╸╺\n") for line in shown.export_text().splitlines()]


def test_on_a_terminal_all_values_are_under_one_another_and_there_are_no_lines(on_terminal):
    terminal = on_terminal()
    with Console(1000, 8, is_first=True) as console:
        assert as_text(console) == ["compiling the first step"]
        console.show_evaluation(Evaluated(5, 9.9))  # before the first step there is no view to show it in
        console.evaluating(1, 5, "batches")
        assert as_text(console) == ["evaluating, 1 of 5 batches"]
        console.show(changed(step=9, status="shard [red].jsonl", next_evaluation=12, next_save=20, mfu=41.23))
        console.show_evaluation(Evaluated(9, 2.71828))  # at once
        assert as_text(console) == [
            "loss 3.1416, eval 2.7183 at step 9",
            "lr 6.00e-04, 123,457 tokens/s, MFU 41.2 %",
            "evaluation at step 12, checkpoint at step 20",
            "shard [red].jsonl",
            "9/1,000, 4m08s left",
        ]
        console.evaluating(2, 5, "batches")
        assert "evaluating, 2 of 5 batches" in as_text(console)
        console.show(changed(step=1000))
        assert as_text(console)[-1] == "1,000/1,000"
    sent = terminal.getvalue()
    assert "train 9" not in sent
    assert "9.9" not in sent


def test_on_a_terminal_the_complete_log_is_above_the_view(on_terminal, monkeypatch):
    terminal = on_terminal()
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "40")
    lines = ["before it", *(f"line {step} [red]of the log[/nothing]" for step in range(1, 6))]
    with logging_restored():
        start_console_log()
        log.info(lines[0])
        with Console(5, 0, is_first=True) as console:
            for step in range(1, 6):
                log.info(lines[step])
                console.show(changed(step=step))
        log.info("after it")
    sent = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    sent = [line.rstrip() for line in sent if line.strip()]
    logged = [*lines, "after it"]
    assert [line for line in sent if line in logged] == logged
    assert sent[-2].strip() == "5/5"


def test_a_terminal_without_cursor_movement_has_lines(on_terminal):
    """A live view would show nothing on it until the end."""
    terminal = on_terminal("dumb")
    with Console(10, 0, is_first=True) as console:
        console.show(SHOWN)
    assert terminal.getvalue().splitlines() == ["train 1/10, loss 3.142, lr 6.00e-04, 123,457 tokens/s, 2s left"]
