"""Naming the process that a run of several processes has lost.

JAX detects a lost process by its heartbeat, or by a closed connection to process 0, which coordinates the run, and
then aborts the others with SIGABRT and a C++ trace that does not say which one. Instead, `end` logs one line and exits
with code 1. To know the process by then, every process counts up a key in the coordinator's store, and process 0
publishes whose key does not change. Such a process is only named if JAX or a collective fails too: the thread that
counts may be delayed, JAX's heartbeat is not.

JAX calls `end` through its option `missed_heartbeat_callback`. In the versions up to 0.12 at least, the call itself
fails (`std::bad_cast`: Python has no type for its argument, a status), and C++ ends the process. `catch_failed_calls`
is C++'s handler for that.
"""

import atexit
import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from lmtrain.runtime.logging import ALONE, Processes, log

_COUNTS = "lmtrain/alive/"
_SILENT = "lmtrain/silent/"
ENDED = "ended"  # instead of a count
# Counts in one heartbeat timeout of JAX, and how many may be missing before a process is silent.
_COUNTS_IN_TIMEOUT = 10
_MISSING = 3


class LostProcesses:
    """Watches the other processes of a run from `watch` on. `timeout`: JAX's heartbeat timeout in seconds."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._period = timeout / _COUNTS_IN_TIMEOUT
        self.processes: Processes = ALONE
        self._silent: list[int] = []
        self._ends = threading.Event()

    def watch(self, client: Any) -> None:
        """Start to watch, with the client of the coordinator."""
        thread = threading.Thread(target=self._count, args=(client,), name="alive", daemon=True)
        thread.start()

        def stop() -> None:  # before JAX disconnects: a call that returns to a Python that has ended would crash
            self._ends.set()
            thread.join(self._timeout)

        atexit.register(stop)

    def end_if_lost(self) -> None:
        """After the failure of a collective: end this process if another one is lost, which may take a while to see."""
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            if self._silent:
                self.end()
            time.sleep(self._period / 10)

    def end(self, *_: object) -> None:
        """Log which process was lost, and exit at once with code 1. JAX passes a status, which names none."""
        log.error(describe(self._silent or ([] if self.processes.is_first else [0]), self.processes.count))
        logging.shutdown()
        os._exit(1)

    def _count(self, client: Any) -> None:
        number, ended = 0, False
        seen = {index: ("", time.monotonic()) for index in range(self.processes.count)}
        while not ended:
            number, ended = number + 1, self._ends.wait(self._period)
            try:
                value = ENDED if ended else str(number)
                client.key_value_set(f"{_COUNTS}{self.processes.index}", value, allow_overwrite=True)
                if self.processes.is_first:
                    seen = last_changes(seen, client.key_value_dir_get(_COUNTS))
                    since = time.monotonic() - _MISSING * self._period
                    self._silent = [i for i, (value, at) in seen.items() if value != ENDED and at < since]
                    client.key_value_set(f"{_SILENT}now", json.dumps(self._silent), allow_overwrite=True)
                else:
                    self._silent = next((json.loads(text) for _, text in client.key_value_dir_get(_SILENT)), [])
            except Exception:  # the coordinator does not answer: the next count may; if not, JAX notices too
                self._silent = [] if self.processes.is_first else [0]


def last_changes(
    seen: Mapping[int, tuple[str, float]], entries: Iterable[tuple[str, str]]
) -> dict[int, tuple[str, float]]:
    """The value of each process's key, and when it was first seen. `entries`: the keys as they are now."""
    now = {int(key.rpartition("/")[2]): value for key, value in entries}
    return {
        index: (value, at) if now.get(index, value) == value else (now[index], time.monotonic())
        for index, (value, at) in seen.items()
    }


def describe(lost: list[int], count: int) -> str:
    """The message of a run of `count` processes that has lost some."""
    names = f"processes {', '.join(map(str, lost))}" if len(lost) > 1 else f"process {lost[0]}" if lost else "a process"
    return (
        f"lmtrain: error: lost {names} of {count}, which ended or does not respond; see its log. Run the same command "
        "again in all processes to resume from the last checkpoint"
    )


_TERMINATE = ctypes.CFUNCTYPE(None)
_BAD_CAST = b"St8bad_cast"  # the name of C++'s type
_kept: list[Any] = []  # C++ has their addresses


def catch_failed_calls(lost: LostProcesses) -> None:
    """Let C++ call `lost.end` when JAX's call of it has failed. Other failures in C++ end the process as before."""
    library = ctypes.CDLL("libstdc++.so.6")
    set_terminate, current_type = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    set_terminate.argtypes, set_terminate.restype = [_TERMINATE], ctypes.c_void_p
    current_type.restype = ctypes.c_void_p

    def terminate() -> None:
        current = current_type()
        if current and ctypes.cast(current, ctypes.POINTER(ctypes.c_char_p))[1] == _BAD_CAST:
            lost.end()
        _TERMINATE(before)()

    _kept.append(_TERMINATE(terminate))
    before = set_terminate(_kept[-1])
