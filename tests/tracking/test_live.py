"""The live view: its contents, the sparkline of the loss, and the log above it."""

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from lmtrain.runtime.logging import log, logging_restored, start_console_log
from lmtrain.tracking import console
from lmtrain.tracking.console import Evaluated, LiveView, Shown, sparkline, thin

SHOWN = Shown(step=250, loss=3.14159, learning_rate=6e-4, tokens_per_second=123_456.7, seconds_per_step=0.25)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when the test changes it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
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


@pytest.mark.parametrize("limit", [2, 4, 40])
@pytest.mark.parametrize("number", [0, 1, 39, 40, 41, 79, 80, 1000, 4096])
def test_a_long_series_has_few_points_each_the_mean_of_the_same_number_of_values(limit, number):
    points = thin([float(value) for value in range(number)], limit)
    assert len(points) < limit
    if number < limit:
        assert points == list(range(number))
    if len(points) > 1:
        each = points[1] - points[0]
        assert points == [each * index + (each - 1) / 2 for index in range(len(points))]
        assert math.log2(each).is_integer()
        assert number - each * len(points) < each  # at most the last point is incomplete
        assert len(points) >= limit // 2 or each == 1


def test_nan_is_ignored():
    assert thin([1.0, math.nan, math.inf, -math.inf, 2.0], 10) == [1.0, 2.0]


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


@pytest.mark.parametrize(
    ("values", "line", "expected"),
    [
        ({"next_save": 250}, -1, ["next", "checkpoint at step 250"]),  # due now
        ({"loss": math.nan}, 2, ["loss", "nan"]),
        ({"step": 1000}, 1, ["━" * 40 + " 1,000/1,000", "100 %"]),  # at the end no time is left
        ({"status": "shard [red].jsonl"}, -1, ["status", "shard [red].jsonl"]),  # no markup
    ],
)
def test_single_values(view, values, line, expected):
    view.show(Shown(**SHOWN.__dict__ | values))
    assert re.split(" {2,}", text(view)[line]) == expected


def test_the_time_left_depends_on_the_steps_left_not_on_the_start_up(clock):
    view = LiveView("one", total=1000, start=200)
    assert text(view)[1].endswith(" 200/1,000  20 %")
    clock.seconds += 5000  # compiling
    view.show(SHOWN)
    assert text(view)[1].endswith(" 250/1,000  25 %    3m08s left")


def test_a_step_that_is_shown_again_counts_once_in_the_sparkline(view):
    view.show(SHOWN)
    view.show(Shown(**SHOWN.__dict__ | {"evaluated": Evaluated(250, 3.0)}))
    view.show(Shown(**SHOWN.__dict__ | {"step": 251, "loss": 3.0}))
    assert text(view)[2].endswith("3.0000  █▁") or text(view)[2].endswith("3.0000  ▁▁"), text(view)[2]
    assert len(text(view)[2].split()[-1]) == 2


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


# on a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["100", "0"])
def test_on_a_terminal_the_complete_log_is_above_the_view(monkeypatch, columns):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": columns, "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    lines = ["before it", *(f"line {step} [red]of the log[/nothing]" for step in range(1, 6))]
    with logging_restored():
        start_console_log()
        log.info(lines[0])
        with LiveView("one", total=5, start=0) as view:
            for step in range(1, 6):
                log.info(lines[step])
                view.show(Shown(**SHOWN.__dict__ | {"step": step, "loss": 6.0 - step}))
                view._live.refresh()
            log.warning("saved checkpoints/one/step-5")
        log.info("after it")
    sent = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    sent = [line.rstrip() for line in sent if line.strip()]
    logged = [*lines, "saved checkpoints/one/step-5", "after it"]
    assert [line for line in sent if line in logged] == logged
    first, bar, loss, speed, last = sent[-5:]  # the view as it was drawn last
    assert (first[:5], bar[-10:], loss.split()[:2], speed[:5]) == ("one  ", "5/5  100 %", ["loss", "1.0000"], "speed")
    assert last == "after it"
