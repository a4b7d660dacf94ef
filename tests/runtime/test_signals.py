"""Signals: the first requests a stop, the second exits immediately; the handlers are restored."""

import signal
import subprocess
import sys

import pytest

from lmtrain.runtime.signals import StopRequest

CHILD = """
import signal
from lmtrain.runtime.logging import start_console_log
from lmtrain.runtime.signals import StopRequest

start_console_log()
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        signal.pause()
    print("requested", flush=True)
    input()
print("left", flush=True)
input()
print("end", flush=True)
"""


class Child:
    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], text=True, **pipes)

    def expect(self, line):
        assert self.process.stdout.readline() == f"{line}\n"

    def end(self):
        """Wait for the exit; returns exit status and the remaining stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def child():
    child = Child()
    child.expect("ready")
    yield child
    child.process.kill()
    child.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop_and_is_logged(child, number):
    child.process.send_signal(number)
    child.expect("requested")
    child.process.stdin.write("\n\n")
    notice = f"{number.name}: finishing this step and saving; send it again to exit immediately\n"
    assert child.end() == (0, "left\nend\n", notice)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_exits_immediately_with_75(child, second):
    child.process.send_signal(signal.SIGTERM)
    child.expect("requested")
    child.process.send_signal(second)
    status, stdout, _ = child.end()
    assert (status, stdout) == (75, "")


def test_after_leaving_a_signal_ends_the_process_as_usual(child):
    child.process.send_signal(signal.SIGTERM)
    child.expect("requested")
    child.process.stdin.write("\n")
    child.process.stdin.flush()
    child.expect("left")
    child.process.send_signal(signal.SIGTERM)
    status, stdout, _ = child.end()
    assert (status, stdout) == (-signal.SIGTERM, "")


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def fail_inside():
    with StopRequest() as stop:
        assert not stop.requested
        raise RuntimeError(f"inside {handlers() == [stop._handle, stop._handle]}")


def test_handlers_are_restored_when_the_block_raises():
    before = handlers()
    with pytest.raises(RuntimeError, match="inside True"):
        fail_inside()
    assert handlers() == before
