"""The entry point: signals that arrive while Python is still importing."""

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

# The first slow import of the commands, which does not end.
MODULE = """
import ctypes, pathlib

pathlib.Path("importing").touch()
lock = ctypes.create_string_buffer(64)
while True:
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


# Which signals are caught is tests/runtime/test_signals.py's. SIGINT is the one that Python handles itself.
@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("train", signal.SIGTERM),
        pytest.param("plan", signal.SIGINT, marks=pytest.mark.long),
        *(pytest.param("train", number, marks=pytest.mark.long) for number in (signal.SIGUSR1, signal.SIGHUP)),
    ],
)
def test_a_signal_during_imports_exits_with_75(tmp_path, verb, number):
    (tmp_path / "pydantic_core.py").write_text(MODULE)
    command = [sys.executable, "-c", "from lmtrain.__main__ import main; main()", verb, "tiny.yaml"]
    here = {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=here, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "importing").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75
    assert errors.startswith(f"{number.name}: ")


def test_the_console_script_is_this_entry_point():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["scripts"] == {"lmtrain": "lmtrain.__main__:main"}
