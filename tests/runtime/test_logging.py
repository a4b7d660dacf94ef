"""The log of a run: plain lines on the terminal, times in the file, to which restarts append."""

import re
import subprocess
import sys

import pytest

RUN = """
import logging, sys
from lmtrain.runtime.logging import log, start_console_log, start_file_log

start_console_log()
print(start_file_log(sys.argv[1], "run-1"))
log.info(f"{sys.argv[2]} ☃")
log.debug("too much")
log.warning("careful")
for name in ("absl", "jax", "jax._src.dispatch", "orbax", "tensorboardX", "grain"):
    logging.getLogger(name).info("chatter")
logging.getLogger("jax").warning("important")
"""


@pytest.fixture
def run(tmp_path):
    def start(message, folder="logs/deep"):
        command = [sys.executable, "-c", RUN, folder, message]
        environment = {"PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done

    return start


def test_the_terminal_shows_plain_lines_without_info_messages_of_libraries(run):
    assert run("hello").stderr == "hello ☃\ncareful\nimportant\n"


def test_the_file_has_times_and_levels(run, tmp_path):
    done = run("hello")
    assert done.stdout == "logs/deep/run-1.log\n"
    lines = (tmp_path / "logs" / "deep" / "run-1.log").read_text(encoding="utf-8").splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines] == [
        "INFO lmtrain: hello ☃",
        "WARNING lmtrain: careful",
    ]


def test_restarts_append_to_the_file(run, tmp_path):
    run("first")
    run("second")
    text = (tmp_path / "logs" / "deep" / "run-1.log").read_text(encoding="utf-8")
    assert re.findall(r"lmtrain: (\w+) ☃", text) == ["first", "second"]
