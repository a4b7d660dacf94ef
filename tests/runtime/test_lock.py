"""File lock: one holder at a time, also after a holder was killed."""

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from lmtrain.runtime import storage
from lmtrain.runtime.storage import FileLock

HOLD = """
import sys
from lmtrain.runtime.storage import FileLock

held = FileLock(sys.argv[1])
print(held.acquire(), flush=True)
sys.stdin.readline()
held.release()
print("released", flush=True)
sys.stdin.readline()
"""

# In each turn, a process creates a file, which fails if another process holds the lock at the same time.
CONTEND = """
import os, sys, time
from lmtrain.runtime.storage import FileLock

path, turns, end = sys.argv[1], 0, time.monotonic() + 0.7
while time.monotonic() < end:
    held = FileLock(path)
    if held.acquire():
        os.close(os.open(path + ".inside", os.O_CREAT | os.O_EXCL))
        os.unlink(path + ".inside")
        held.release()
        turns += 1
print(turns)
"""


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / ".building")


@pytest.fixture
def start():
    """`start(program, path)` starts a Python process that runs `program`; all are killed after the test."""
    processes = []

    def begin(program, path):
        command = [sys.executable, "-c", program, path]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        processes.append(subprocess.Popen(command, text=True, **pipes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("killed", [False, True])
def test_another_process_gets_the_lock_only_after_its_holder_has_released_it_or_was_killed(path, start, killed):
    other = start(HOLD, path)
    assert other.stdout.readline() == "True\n"
    ours = FileLock(path)
    assert not ours.acquire()
    assert ours.holder() == f"process {other.pid} on {socket.gethostname()}"
    if killed:
        other.send_signal(signal.SIGKILL)
        other.wait()
        with open(path, "a") as file:  # longer than the text that replaces it
            file.write("of a machine with a very long name")
    else:
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "released\n"
    assert ours.acquire()
    assert ours.holder() == f"process {os.getpid()} on {socket.gethostname()}"
    ours.release()


def test_the_file_exists_while_the_lock_is_held_and_only_its_holder_releases_it(path):
    held, other = FileLock(path), FileLock(path)
    assert held.acquire()
    assert not other.acquire()
    other.release()
    assert os.path.exists(path)
    assert not other.acquire()
    held.release()
    held.release()
    assert not os.path.exists(path)
    assert other.acquire()
    os.unlink(path)
    other.release()
    assert other.acquire()
    other.release()


def test_contending_processes_never_hold_the_lock_at_once(path, start):
    processes = [start(CONTEND, path) for _ in range(4)]
    results = [process.communicate(timeout=300) for process in processes]
    assert [errors for _, errors in results] == [""] * 4
    assert sum(int(turns) for turns, _ in results) > 100
    assert not os.path.exists(path)


def test_a_file_that_is_deleted_before_it_is_locked_is_opened_again(path, monkeypatch):
    """Between opening and locking, its holder deletes the file and another process creates it again."""
    first, other, ours = FileLock(path), FileLock(path), FileLock(path)
    assert first.acquire()
    flock, calls = storage.fcntl.flock, []

    def slow_flock(descriptor, how):
        if not calls:
            calls.append(descriptor)
            first.release()
            assert other.acquire()
        return flock(descriptor, how)

    monkeypatch.setattr(storage.fcntl, "flock", slow_flock)
    assert not ours.acquire()
    assert calls
    other.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
def test_on_file_systems_without_locks_acquire_always_succeeds(path, monkeypatch, number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.fcntl, "flock", flock)
    one = FileLock(path)
    assert one.acquire()
    assert FileLock(path).acquire()
    one.release()
    assert not os.path.exists(path)
