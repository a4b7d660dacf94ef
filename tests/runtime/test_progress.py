"""Progress: rate-limited plain lines, the remaining time, and a bar on a terminal."""

import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lmtrain.runtime import progress
from lmtrain.runtime.progress import Progress, format_seconds

BAR = """
import sys
from lmtrain.runtime.progress import Progress
with Progress("train", 10) as bar:
    for done in range(11):
        bar.update(done, f"step {done} {sys.argv[1]}")
"""


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


def test_a_line_is_a_single_write_to_avoid_interleaving(clock, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False))
    with Progress("train", 100) as bar:
        bar.update(1, "step 1", force=True)
        bar.update(100, "step 100", force=True)
    assert written == ["train step 1, 0s left\n", "train step 100\n"]


@pytest.mark.parametrize(
    ("start", "seconds", "done", "text"),
    [
        (0, 10, 1, "x, 1m30s left"),
        (0, 10, 5, "x, 10s left"),
        (50, 10, 60, "x, 40s left"),
        (0, 36000, 1, "x, 90h00m left"),
        (0, 10, 10, "x"),
        (0, 10, 0, "x"),
        (5, 10, 5, "x"),
        (5, 10, 3, "x"),
        (0, 10, 12, "x"),
    ],
)
def test_the_remaining_time_is_estimated_from_the_work_of_this_process(clock, capsys, start, seconds, done, text):
    bar = Progress("p", 100 if start == 50 else 10, start)
    clock.seconds += seconds
    bar.update(done, "x", force=True)
    assert capsys.readouterr().err == f"p {text}\n"


@pytest.mark.parametrize("text", ["loss 3.1", "shard [loss].jsonl", "[/x]"])
def test_on_a_terminal_a_bar_shows_label_and_text_unchanged(text):
    terminal, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", BAR, text], stderr=child, env=environment)
    os.close(child)
    shown = b""
    while chunk := read(terminal):
        shown += chunk
    os.close(terminal)
    assert process.wait(300) == 0
    assert b"train" in shown
    assert f"step 10 {text}".encode() in shown


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end has closed
        return b""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (75, "1m15s"),
        (3599, "59m59s"),
        (3599.7, "1h00m"),
        (7300, "2h01m"),
        (360000, "100h00m"),
    ],
)
def test_formatted_seconds(seconds, text):
    assert format_seconds(seconds) == text
