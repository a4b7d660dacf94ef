"""The entry point: signals that arrive while Python is still importing."""

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from lmtrain.runtime.signals import STOP_SIGNALS

# The first slow import of the commands, which does not end.
MODULE = """
import ctypes, pathlib

pathlib.Path("importing").touch()
lock = ctypes.create_string_buffer(64)
while True:
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def signalled(folder, verb, number):
    """Send a signal to a command that is importing. -> its exit code, and its output on stderr"""
    (folder / "pydantic_core.py").write_text(MODULE)
    command = [sys.executable, "-c", "from lmtrain.__main__ import main; main()", verb, "tiny.yaml"]
    process = subprocess.Popen(command, cwd=folder, env={"PYTHONPATH": str(folder)}, stderr=subprocess.PIPE, text=True)
    try:
        while not (folder / "importing").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("verb", "number"),
    [*(("train", number) for number in STOP_SIGNALS), ("export-hf", signal.SIGINT), ("plan", signal.SIGTERM)],
)
def test_a_signal_during_imports_exits_with_75(tmp_path, verb, number):
    line = f"{number.name}: exiting immediately; run the same command again\n"
    assert signalled(tmp_path, verb, number) == (75, line)


def test_the_console_script_is_this_entry_point():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["scripts"] == {"lmtrain": "lmtrain.__main__:main"}
