"""Signals: at once, or the first requests a stop and the second exits immediately; the handlers are restored."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.runtime.signals import STOP_SIGNALS, StopRequest

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
    def __init__(self, script):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", script], text=True, **pipes)

    def expect(self, line):
        assert self.process.stdout.readline() == f"{line}\n"

    def end(self):
        """Wait for the exit; returns exit status and the remaining stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def started():
    """`started(script)` runs a script that prints `ready`."""
    children = []

    def start(script):
        children.append(Child(script))
        children[-1].expect("ready")
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate()


@pytest.fixture
def child(started):
    return started(CHILD)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop_and_is_logged(child, number):
    child.process.send_signal(number)
    child.expect("requested")
    child.process.stdin.write("\n\n")
    status, stdout, notice = child.end()
    assert (status, stdout, notice.count("\n")) == (0, "left\nend\n", 1)
    assert notice.startswith(f"{number.name}: ")


def test_a_hangup_requests_a_stop_and_never_exits_immediately(child):
    """A closed terminal sends SIGHUP twice; systemd sends it after SIGTERM."""
    child.process.send_signal(signal.SIGHUP)
    child.expect("requested")
    for number in (signal.SIGHUP, signal.SIGHUP):
        child.process.send_signal(number)
    child.process.stdin.write("\n\n")
    assert child.end()[:2] == (0, "left\nend\n")


def test_a_command_that_nohup_started_ignores_a_hangup(started):
    child = started(f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{CHILD}")
    child.process.send_signal(signal.SIGHUP)
    child.process.send_signal(signal.SIGTERM)
    child.expect("requested")
    child.process.stdin.write("\n\n")
    status, stdout, notice = child.end()
    assert (status, stdout, notice.count("\n")) == (0, "left\nend\n", 1)
    assert notice.startswith("SIGTERM: ")


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
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def fail_inside(before):
    with StopRequest():
        raise RuntimeError(f"replaced: {not set(handlers()) & set(before)}")


def test_handlers_are_restored_when_the_block_raises():
    before = handlers()
    with pytest.raises(RuntimeError, match="replaced: True"):
        fail_inside(before)
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


# C code that Python cannot interrupt, like the compiler and collectives: a lock that the thread already holds.
STUCK = """
import ctypes
from lmtrain.runtime.signals import StopRequest, end_at_once

end_at_once()
{begin}
print("ready", flush=True)
lock = ctypes.create_string_buffer(64)
while True:
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_a_stop_request_the_first_signal_ends_a_process_that_is_stuck_in_c_code(started, number):
    child = started(STUCK.format(begin=""))
    child.process.send_signal(number)
    status, _, notice = child.end()
    assert (status, notice.count("\n")) == (75, 1)
    assert notice.startswith(f"{number.name}: ")


def test_a_signal_ends_a_process_whose_stderr_cannot_be_written(started):
    child = started(STUCK.format(begin="import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"))
    child.process.send_signal(signal.SIGTERM)
    assert child.end() == (75, "", "")


def test_the_second_signal_ends_a_process_that_is_stuck_in_c_code(started):
    child = started(STUCK.format(begin="StopRequest().begin()"))
    child.process.send_signal(signal.SIGTERM)
    child.process.send_signal(signal.SIGUSR1)
    assert child.end()[:2] == (75, "")


FORK = """
import os, signal, warnings
from lmtrain.runtime.signals import end_at_once

end_at_once()
warnings.simplefilter("ignore")  # of Python 3.12 on: a library may have threads
child = os.fork()
if child == 0:
    print("ready", flush=True)
    while True:
        signal.pause()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
input()
"""


def test_a_signal_to_a_forked_process_does_not_end_its_parent(started):
    child = started(FORK)
    (forked,) = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text().split()
    os.kill(int(forked), signal.SIGTERM)
    child.expect(f"{-signal.SIGTERM}")
    child.process.stdin.write("\n")
    assert child.end() == (0, "", "")
