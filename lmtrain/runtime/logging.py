"""The log of a run: messages go to the terminal and to `<log_dir>/<run_id>.log`, appended over restarts."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmtrain.runtime.processes import ALONE, Processes

log = logging.getLogger("lmtrain")

# These tell their users about every file and thread at INFO.
_CHATTY = ("absl", "jax", "orbax", "tensorboardX", "urllib3", "asyncio", "grain")


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: a live view puts itself there, to draw below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def logging_restored() -> Iterator[None]:
    """Round a command: the logs that it starts end with it, and logging is afterwards as it was before.

    A program may call several commands, or train several runs, and have a log of its own. Levels of libraries stay:
    what failed in one, and was handled, may be logged by it with a traceback when the process ends.
    """
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    try:
        yield
    finally:
        for handler in [handler for handler in log.handlers if handler not in handlers]:
            log.removeHandler(handler)
            handler.close()
        for handler in [handler for handler in handlers if handler not in log.handlers]:
            log.addHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def start_console_log(processes: Processes = ALONE) -> None:
    """Messages of lmtrain to stderr as plain lines; of libraries only from warnings up.

    Of several processes only the first tells what all would, and the others say who they are.
    """
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    if not processes.is_first:
        handler.setFormatter(logging.Formatter(f"[process {processes.index}] %(message)s"))
        handler.setLevel(logging.WARNING)
    for earlier in [handler for handler in log.handlers if isinstance(handler, _StderrHandler)]:
        log.removeHandler(earlier)  # of another run in this process
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):  # Orbax tells there, at length, what it then raises
        logging.getLogger(name).setLevel(logging.CRITICAL)


def start_file_log(log_dir: str, run: str, processes: Processes = ALONE) -> str:
    """Also append everything to `<log_dir>/<run>.log`, with times; each further process has a file of its own.

    Returns the path.
    """
    os.makedirs(log_dir, exist_ok=True)
    path = os.path.join(log_dir, f"{run}.log" if processes.is_first else f"{run}.process-{processes.index}.log")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    return path
