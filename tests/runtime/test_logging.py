"""The log of a run: plain lines on the terminal, times in the file, to which restarts append."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import errors_in_files, log, logging_restored, start_console_log, start_file_log


@pytest.fixture(autouse=True)
def restored():
    with logging_restored():
        yield


def test_the_terminal_shows_plain_lines_and_the_file_to_which_restarts_append_has_times(tmp_path, capsys):
    folder = tmp_path / "logs" / "deep"
    for message in ("first", "second"):
        with logging_restored():
            start_console_log()
            path = start_file_log(str(folder), "run-1")
            log.info(f"{message} ☃")
            log.debug("too much")
            log.warning("careful")
            for name in ("absl", "jax._src.dispatch", "orbax", "grain"):
                assert not logging.getLogger(name).isEnabledFor(logging.INFO)
        assert capsys.readouterr() == ("", f"{message} ☃\ncareful\n")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines] == [
        *("INFO lmtrain: first ☃", "WARNING lmtrain: careful"),
        *("INFO lmtrain: second ☃", "WARNING lmtrain: careful"),
    ]


SECRETS = """
import logging
from lmtrain.runtime.logging import log, start_console_log, start_file_log

start_console_log()
start_file_log("logs", "run-1")
log.info("reading https://me:planted@host/a.jsonl?version=1&token=planted")
try:
    raise OSError("GET https://host/a?X-Amz-Signature=planted")
except OSError:
    log.exception("failed")
logging.getLogger("urllib3").warning("retrying /a.jsonl?X-Amz-Signature=planted")
"""


def test_secrets_in_urls_are_masked_also_in_tracebacks_and_messages_of_libraries(tmp_path):
    done = subprocess.run([sys.executable, "-c", SECRETS], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "reading https://***@host/a.jsonl?version=1&***"
    assert "OSError: GET https://host/a?***" in lines
    assert lines[-1] == "retrying /a.jsonl?***"
    assert "planted" not in done.stderr + (tmp_path / "logs" / "run-1.log").read_text(encoding="utf-8")


def test_an_error_that_ends_a_run_is_in_its_file_alone(tmp_path, capsys):
    start_console_log()
    path = start_file_log(str(tmp_path), "run-1")
    for error in (UserError("another run"), KeyError("a bug")):
        with pytest.raises(type(error)), errors_in_files():
            raise error
    assert capsys.readouterr().err == ""
    text = Path(path).read_text(encoding="utf-8")
    assert "ERROR lmtrain: lmtrain: error: another run\n" in text
    assert "Traceback" in text
    assert "KeyError: 'a bug'" in text
