"""The live view: its contents, the sparkline of the loss, and the log above it."""

import io
import math
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from lmtrain.tracking import live
from lmtrain.tracking.live import Evaluated, LiveView, Shown, Thinned, sparkline

SHOWN = Shown(step=250, loss=3.14159, learning_rate=6e-4, tokens_per_second=123_456.7, seconds_per_step=0.25)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when the test changes it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def view(clock):
    return LiveView("one  gpt2, 1,000 parameters", total=1000, start=0)


def text(view: LiveView, width: int = 120) -> list[str]:
    """The drawn lines, without colours."""
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(view.render())
    return [line.rstrip() for line in console.export_text().splitlines()]


# sparkline


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([5.0], "▁"),
        ([2.0, 2.0, 2.0], "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "▁▁▁▂▃▅▆▇█"),  # the first two are below the scale
        ([8, 7, 6, 5, 4, 3, 2, 1], "███▇▅▄▂▁"),
        ([-1.0, 0.0, -1.0, 0.0], "▁█▁█"),
        ([1e-9, 2e-9, 1e-9, 2e-9], "▁█▁█"),
    ],
)
def test_a_sparkline_has_a_bar_for_each_value(values, expected):
    assert sparkline(values) == expected


def test_an_initial_drop_does_not_flatten_later_values():
    line = sparkline([1000.0, 500.0, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5])
    assert line[:2] == "██"
    assert len(set(line[2:])) == 6


# thinning


def test_few_values_are_kept_unchanged():
    thinned = Thinned(10)
    for value in range(9):
        thinned.add(value)
    assert thinned.points == list(range(9))


@pytest.mark.parametrize("most", [2, 4, 40])
@pytest.mark.parametrize("number", [1, 39, 40, 41, 79, 80, 1000, 4096])
def test_a_long_series_has_few_points_each_the_mean_of_the_same_number_of_values(most, number):
    thinned = Thinned(most)
    for value in range(number):
        thinned.add(float(value))
    points = thinned.points
    assert len(points) < most
    if len(points) > 1:
        each = points[1] - points[0]
        assert points == [each * index + (each - 1) / 2 for index in range(len(points))]
        assert math.log2(each).is_integer()
        assert number - each * len(points) < each  # at most the last point is incomplete
        assert len(points) >= most // 2 or each == 1 or number < most


def test_nan_is_ignored():
    thinned = Thinned(10)
    for value in (1.0, math.nan, math.inf, -math.inf, 2.0):
        thinned.add(value)
    assert thinned.points == [1.0, 2.0]


# the view


def test_before_the_first_step_it_shows_that_it_is_compiling(view, clock):
    clock.seconds += 75
    first, bar, last = text(view)
    assert first == "one  gpt2, 1,000 parameters  1m15s"
    assert bar.endswith(" 0/1,000  0 %")
    assert last == "compiling the first step"


def test_a_step_shows_progress_loss_and_speed_and_no_missing_values(view, clock):
    clock.seconds += 50
    view.show(SHOWN)
    head, bar, loss, speed = text(view)
    assert head.endswith("parameters  50s")
    assert bar.endswith(" 250/1,000  25 %    3m08s left")
    assert re.split(" {2,}", loss) == ["loss", "3.1416", "▁"]
    assert re.split(" {2,}", speed) == ["speed", "123,457 tokens/s", "250 ms a step", "lr 6.00e-04"]


def test_all_available_values_are_shown(view, clock):
    clock.seconds += 50
    shown = SHOWN.__dict__ | {
        "seconds_per_step": 2.5,
        "mfu": 41.23,
        "evaluated": Evaluated(200, 3.2),
        "next_evaluation": 300,
        "next_save": 262,
        "status": "cache 41 of 150 shards",
    }
    view.show(Shown(**shown))
    lines = [re.split(" {2,}", line) for line in text(view)[2:]]
    assert lines == [
        ["loss", "3.1416", "▁"],
        ["eval", "3.2000", "after step 200"],
        ["speed", "123,457 tokens/s", "2.50 s a step", "MFU 41.2 %", "lr 6.00e-04"],
        ["next", "evaluation at step 300 (in 2m05s), checkpoint at step 262 (in 30s)"],
        ["status", "cache 41 of 150 shards"],
    ]


def test_an_evaluation_or_save_due_now_has_no_remaining_time(view):
    view.show(Shown(**SHOWN.__dict__ | {"next_save": 250}))
    assert re.split(" {2,}", text(view)[-1]) == ["next", "checkpoint at step 250"]


def test_the_time_left_depends_on_the_steps_left_not_on_the_start_up(clock):
    view = LiveView("one", total=1000, start=200)
    assert text(view)[1].endswith(" 200/1,000  20 %")
    clock.seconds += 5000  # compiling
    view.show(SHOWN)
    assert text(view)[1].endswith(" 250/1,000  25 %    3m08s left")


def test_at_the_end_no_time_is_left(view, clock):
    clock.seconds += 10
    view.show(Shown(**SHOWN.__dict__ | {"step": 1000}))
    assert text(view)[1].endswith(" 1,000/1,000  100 %")


def test_a_step_that_is_shown_again_counts_once_in_the_sparkline(view):
    view.show(SHOWN)
    view.show(Shown(**SHOWN.__dict__ | {"evaluated": Evaluated(250, 3.0)}))
    view.show(Shown(**SHOWN.__dict__ | {"step": 251, "loss": 3.0}))
    assert text(view)[2].endswith("3.0000  █▁") or text(view)[2].endswith("3.0000  ▁▁"), text(view)[2]
    assert len(text(view)[2].split()[-1]) == 2


def test_a_nan_loss_is_shown(view):
    view.show(Shown(**SHOWN.__dict__ | {"loss": math.nan}))
    assert re.split(" {2,}", text(view)[2]) == ["loss", "nan"]


def test_names_with_brackets_are_shown_unchanged():
    view = LiveView("[bold]one[/x]", total=10, start=0)
    view.show(Shown(**SHOWN.__dict__ | {"step": 1, "status": "shard [red].jsonl"}))
    lines = text(view)
    assert lines[0].startswith("[bold]one[/x]")
    assert lines[-1].endswith("shard [red].jsonl")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_in_a_narrow_terminal_no_line_is_too_wide(view, width):
    view.show(Shown(**SHOWN.__dict__ | {"mfu": 41.2, "next_evaluation": 300, "next_save": 400}))
    assert max(map(len, text(view, width))) <= width


def test_it_draws_on_the_given_console_and_leaves_the_last_state_visible():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    with LiveView("one", total=300, start=0, console=console) as view:
        view.show(SHOWN)
    assert "250/300" in file.getvalue()
    assert "3.1416" in file.getvalue()


# on a real terminal

RUN = """
import sys, time
from lmtrain.tracking.live import LiveView, Shown
from lmtrain.runtime.logging import log, start_console_log

start_console_log()
log.info("before it")
with LiveView("one", total=5, start=0) as view:
    for step in range(1, 6):
        log.info(f"line {step} [red]of the log[/nothing]")
        view.show(Shown(step=step, loss=6.0 - step, learning_rate=1e-3, tokens_per_second=1e4, seconds_per_step=0.1))
        time.sleep(0.3)
    log.warning("saved checkpoints/one/step-5")
log.info("after it")
"""


def on_a_terminal(*command: str) -> str:
    """The output of a program on a terminal of 100 columns."""
    terminal, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stderr=child, stdout=child, env=environment)
    os.close(child)
    sent = b""
    while chunk := _read(terminal):
        sent += chunk
    os.close(terminal)
    assert process.wait(300) == 0, sent
    return sent.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the program closed its end
        return b""


def screen(sent: str) -> list[str]:
    """The lines that a terminal shows in the end, after cursor movements and erasures."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", sent):
        if part == "\n":
            at, column = at + 1, 0
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            lines[at] = lines[at][:column].ljust(column) + part + lines[at][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            at = max(0, at - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            lines[at] = ""
        while at >= len(lines):
            lines.append("")
    return [line.rstrip() for line in lines if line.strip()]


def test_on_a_terminal_the_complete_log_is_above_the_view():
    shown = screen(on_a_terminal(sys.executable, "-c", RUN))
    log = ["before it", *(f"line {step} [red]of the log[/nothing]" for step in range(1, 6))]
    log.append("saved checkpoints/one/step-5")
    assert shown[: len(log)] == log
    view = shown[len(log) : -1]
    assert view[0].startswith("one  ")
    assert view[1].endswith("5/5  100 %")
    assert [line.split()[0] for line in view[2:]] == ["loss", "speed"]
    assert view[2].split()[1] == "1.0000"
    assert shown[-1] == "after it"
