"""Progress: rate-limited plain lines, the remaining time, and a bar on a terminal."""

from types import SimpleNamespace

import pytest

from lmtrain.runtime import progress
from lmtrain.runtime.progress import Progress, format_seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when the test sets it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_plain_lines_on_stderr_are_rate_limited_unless_forced(clock, capsys):
    with Progress("train", 100) as bar:
        for done in range(1, 21):
            clock.seconds += 1
            bar.update(done, f"step {done}", force=done == 8)
    output, errors = capsys.readouterr()
    lines = errors.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"train step {done}" for done in (1, 6, 8, 13, 18)]
    assert output == ""


@pytest.mark.parametrize(
    ("start", "seconds", "done", "text"),
    [(0, 10, 1, "x, 1m30s left"), (50, 10, 60, "x, 40s left"), (0, 10, 10, "x"), (5, 10, 3, "x"), (0, 10, 12, "x")],
)
def test_the_remaining_time_is_estimated_from_the_work_of_this_process(clock, capsys, start, seconds, done, text):
    bar = Progress("p", 100 if start == 50 else 10, start)
    clock.seconds += seconds
    bar.update(done, "x", force=True)
    assert capsys.readouterr().err == f"p {text}\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (75, "1m15s"), (3599.7, "1h00m"), (7300, "2h01m")]
)
def test_formatted_seconds(seconds, text):
    assert format_seconds(seconds) == text
