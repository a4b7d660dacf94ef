"""Standard streams that cannot be written: messages are dropped and the log file says so; results are errors."""

import os
import pty
import subprocess
import sys

import pytest

RUN = """
import sys, warnings
from lmtrain.runtime.output import discard_unwritten, standard_streams
from lmtrain.runtime.logging import log, logging_restored, start_console_log, start_file_log
from lmtrain.runtime.progress import Progress

with standard_streams(has_result=False), logging_restored():
    start_console_log()
    start_file_log("logs", "one")
    with Progress("train", 2) as bar:
        for step in (1, 2):
            bar.update(step, f"step {step}", force=True)
            print("a library")
            warnings.warn("careful")
    log.info("done")
discard_unwritten()
sys.exit(75)
"""


@pytest.fixture
def run_with(tmp_path):
    """`run_with(redirections)` runs RUN in a shell with these redirections. -> its log"""

    def run(redirections, **keywords):
        command = f'"{sys.executable}" -c "$SCRIPT" {redirections}'
        environment = os.environ | {"SCRIPT": RUN, "TERM": "xterm"}
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=300, **keywords)
        assert done.returncode == 75  # and not 120, Python's code of output that was lost at the end
        return (tmp_path / "logs" / "one.log").read_text().splitlines()

    return run


def check(lines, reason):
    named = [line for line in lines if "stderr cannot be written" in line]
    assert len(named) == 1, lines
    assert reason in named[0]
    assert any(line.endswith(": done") for line in lines)


@pytest.mark.parametrize(("redirections", "reason"), [("> /dev/full 2>&1", "space"), ("<&- >&- 2>&-", "closed")])
def test_a_run_whose_messages_cannot_be_written_ends_as_usual_and_its_log_says_why(run_with, redirections, reason):
    check(run_with(redirections), reason)


def test_a_run_survives_the_end_of_the_program_that_reads_its_messages(run_with):
    reader, writer = os.pipe()
    os.close(reader)
    check(run_with("2>&1", stdout=writer), "Broken pipe")
    os.close(writer)


def test_a_run_survives_its_terminal(run_with):
    terminal, child = pty.openpty()
    os.close(terminal)
    check(run_with("", stdout=child, stderr=child), "Input/output error")
    os.close(child)


FULL_LOG = """
from lmtrain.runtime.logging import log, logging_restored, start_console_log, start_file_log

with logging_restored():
    start_console_log()
    start_file_log("logs", "one")
    import os, pathlib
    for message in ("full", "also full"):
        log.info(message)
    os.remove("logs/one.log")
    os.rmdir("logs")
    pathlib.Path("logs").write_text("in the way")
    log.info("done")
"""


def test_a_log_file_that_cannot_be_written_is_named_once_on_stderr(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "one.log").symlink_to("/dev/full")
    command = [sys.executable, "-c", FULL_LOG]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "one.log" not in line] == ["full", "also full", "done"]
    assert done.stderr.count("No space left") == 1


@pytest.mark.parametrize(
    ("arguments", "redirections", "reason"),
    [("config show gpt2_nano", "> /dev/full", "No space left"), ("train --help", ">&-", "closed")],
)
def test_a_result_that_cannot_be_written_is_one_message(tmp_path, arguments, redirections, reason):
    command = f'"{sys.executable}" -m lmtrain {arguments} {redirections}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("lmtrain: error: stdout ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_user_error_that_cannot_be_shown_keeps_its_exit_code(tmp_path):
    command = f'"{sys.executable}" -m lmtrain config check no_such_config 2> /dev/full'
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=300).returncode == 2
