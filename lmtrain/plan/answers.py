"""Answers to requests: start and watch workers, report their failures, and cache their answers."""

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.plan.request import Request
from lmtrain.runtime.atomic_files import UNUSED_SECONDS, remove_temporaries
from lmtrain.runtime.signals import StoppedError, StopRequest

_POLL_SECONDS = 0.05

# Lines of compilers and of JAX that do not explain why a compile failed.
_NOISE = re.compile(
    r"^(\s|W\d{4}|I\d{4}|WARNING|Jax plugin|Traceback|During handling|The above|For simplicity|-{4,}|$)"
)
_QUOTED_LINES, _QUOTED_LENGTH = 4, 400


@dataclass(frozen=True)
class Plan:
    """The answer to a request: what is known of the `program` without compiling it, figures by step, and why figures
    are missing (empty if none are)."""

    program: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state per device."""
        return sum(self.program["state"].values())

    @property
    def peaks(self) -> list[int]:
        """Peak bytes of the compiled steps."""
        return [step["memory"]["peak"] for step in self.steps.values() if "memory" in step]

    @property
    def is_refused(self) -> bool:
        """Whether a compiler found that a step does not fit."""
        return any("does_not_fit" in step for step in self.steps.values())

    def fits(self, capacity: float | None) -> bool | None:
        """Whether all compiled steps fit; without any, false if already the state does not; None if unknown."""
        if self.is_refused:
            return False
        if capacity is None:
            return None
        if not self.steps:
            return False if self.state_bytes > capacity else None
        return max(self.peaks) <= capacity


# What XLA prints before it aborts, and then a stack.
_FAILED_CHECK = re.compile(r"(?:Check failed|RET_CHECK failure|INTERNAL).*")


def ask(request: Request, timeout: float, progress: Callable[[str], None] = lambda text: None) -> Plan:
    """The answer to a request, from the cache or by a worker. `progress` is called repeatedly with a line of text.

    If a compiler fails, is killed or takes longer than `timeout` seconds, the answer has the reason instead of its
    figures. Raises `UserError` for errors in settings, and `StoppedError` after a signal.
    """
    folder = cache_folder() / request.key
    steps = request.steps if request.compile else ()
    known = _read(folder, steps)
    if known is not None and len(known.steps) == len(steps):
        return known
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporaries(str(folder), age=UNUSED_SECONDS)
    missing = tuple(step for step in steps if known is None or step not in known.steps)
    # workers of concurrent plans write the same bytes, each file under a unique temporary name first
    with StopRequest("ending the compiler") as stop, tempfile.TemporaryDirectory(prefix="lmtrain-plan-") as temporary:
        failure = _work(replace(request, steps=missing), Path(temporary), folder, timeout, progress, stop)
    answer = _read(folder, steps)
    if answer is None:
        raise UserError(f"the worker process of the plan failed: {failure or 'it wrote no answer'}")
    return replace(answer, failure=failure)


def read_hlo(request: Request, step: str) -> str | None:
    """The optimized program (HLO text) of an answered request; None if it was not compiled.

    Raises `UserError` if it is corrupt.
    """
    path = cache_folder() / request.key / f"{step}.hlo.gz"
    try:
        return gzip.decompress(path.read_bytes()).decode() if path.exists() else None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        shutil.rmtree(path.parent, ignore_errors=True)
        raise UserError(f"{path} was corrupt and has been deleted; run the command again") from None


def cache_folder() -> Path:
    """The cache folder of answers, below XDG_CACHE_HOME (default: ~/.cache). Raises `UserError` if it has none."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(root) / "lmtrain" / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: plans cannot be cached: {error}; set XDG_CACHE_HOME to another folder") from None
    return folder


def _read(folder: Path, steps: tuple[str, ...]) -> Plan | None:
    """The cached parts of an answer; None without its first part. A corrupt file counts as missing."""
    program = _read_json(folder / "program.json", ("device", "devices", "mesh", "state", "advice"))
    if program is None:
        return None
    read = {step: _read_json(folder / f"{step}.json", ("step",)) for step in steps}
    return Plan(program, {step: figures for step, figures in read.items() if figures is not None})


def _read_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and all(key in values for key in keys) else None


def _work(
    request: Request,
    temporary: Path,
    folder: Path,
    timeout: float,
    progress: Callable[[str], None],
    stop: StopRequest,
) -> str:
    """Run a worker until it exits; it writes its answer into `folder`. -> why it failed; empty on success"""
    asked, log, user_error = (temporary / name for name in ("request.json", "log.txt", "error.txt"))
    asked.write_text(request.to_json())
    command = [sys.executable, "-m", "lmtrain.plan.worker", str(asked), str(folder)]
    began = compiling_since = time.monotonic()
    variables = request.target.environment(request.compile)
    with open(log, "w") as file, _running(command, file, variables) as process:
        while process.poll() is None and not stop.requested:
            if not (folder / "program.json").exists():
                compiling_since = time.monotonic()
            elif time.monotonic() - compiling_since > timeout:
                return f"timeout: it took longer than --compile_timeout {timeout:.0f} s"
            progress(f"{_doing(folder, request)}, {time.monotonic() - began:.0f} s")
            time.sleep(_POLL_SECONDS)
        if stop.requested:
            raise StoppedError
        code = process.returncode
    if user_error.exists():
        raise UserError(user_error.read_text())
    if code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "the compiler's process was killed (SIGKILL), probably because this machine ran out of memory"
    text = log.read_text(errors="replace")
    if code < 0:
        found = _FAILED_CHECK.search(text)
        reason = found[0][:_QUOTED_LENGTH] if found else "without a reason"
        return f"the compiler cannot compile this program and aborted ({signal.Signals(-code).name}): {reason}"
    return quote(text) or f"the compiler's process exited with code {code}"


@contextlib.contextmanager
def _running(command: list[str], log: Any, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed on exit from the block."""
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | variables)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _doing(folder: Path, request: Request) -> str:
    if not (folder / "program.json").exists():
        return "tracing the model"
    steps = request.steps if request.compile else ()
    left = next((step for step in steps if not (folder / f"{step}.json").exists()), None)
    actions = {"train": "compiling the training step", "eval": "compiling the evaluation step"}
    return "finishing" if left is None else actions.get(left, "running a few steps")


def quote(text: str) -> str:
    """The lines of a failed worker's output that state the reason: the end of a Python error, without the traceback."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return "\n".join(line[:_QUOTED_LENGTH] for line in lines[-_QUOTED_LINES:])
