"""Answers to requests: start and watch workers, report their failures, and cache their answers."""

import atexit
import contextlib
import functools
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
from lmtrain.plan.environment import environment
from lmtrain.plan.request import Request

_POLL_SECONDS = 0.05

# Lines of compilers and of JAX that do not explain why a compile failed.
_NOISE = re.compile(
    r"^(\s|W\d{4}|I\d{4}|WARNING|Jax plugin|Traceback|During handling|The above|For simplicity|-{4,}|$)"
)
_QUOTED_LINES, _QUOTED_LENGTH = 4, 400


@dataclass(frozen=True)
class Answer:
    """The estimate, figures by step, and why figures are missing (empty if none are)."""

    estimate: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    from_cache: bool = False

    def fits(self, capacity: float | None) -> bool | None:
        """Whether all compiled steps fit, by the compilers' figures or, without any, the estimate; None if unknown."""
        refused = any("does_not_fit" in step for step in self.steps.values())
        if refused:
            return False
        if capacity is None:
            return None
        peaks = [step["memory"]["peak"] for step in self.steps.values()] or [self.estimate["estimate"]["total"]]
        return bool(max(peaks) <= capacity)


def ask(
    request: Request,
    timeout: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Answer:
    """The answer to a request, from the cache or by a worker. `progress` is called repeatedly with a line of text.

    If a compiler fails, is killed or takes longer than `timeout` seconds, its figures are missing: the answer then
    holds the estimate and the reason. Raises `UserError` for errors in settings.
    """
    folder = cache_folder() / request.key
    steps = request.steps if request.compile else ()
    known = _read(folder, steps)
    if known is not None and len(known.steps) == len(steps):
        return replace(known, from_cache=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # workers of concurrent plans write the same bytes, each file under a unique temporary name first
    with _terminated() as is_terminated, tempfile.TemporaryDirectory(prefix="lmtrain-plan-") as temporary:
        path = Path(temporary) / "request.json"
        missing = tuple(step for step in steps if known is None or step not in known.steps)
        rest = replace(request, steps=missing)
        path.write_text(rest.to_json())
        failure = _work(rest, path, folder, timeout, progress, is_terminated)
    found = _read(folder, steps)
    if found is None:
        raise UserError(f"the worker process of the plan failed: {failure or 'it wrote no estimate'}")
    return replace(found, failure=failure, seconds=time.monotonic() - began)


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
    """The cache folder of answers, below XDG_CACHE_HOME (default: ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return _writable(Path(root) / "lmtrain" / "plans")


@functools.cache
def _writable(folder: Path) -> Path:
    """The folder, or, with a warning, a temporary one if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        print(f"warning: plans are not cached, since {folder} is not writable: {error}", file=sys.stderr)
        temporary = tempfile.mkdtemp(prefix="lmtrain-plans-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)
    return folder


def _read(folder: Path, steps: tuple[str, ...]) -> Answer | None:
    """The cached parts of an answer; None without a complete estimate. A corrupt file counts as missing."""
    estimate = _read_json(folder / "estimate.json", ("device", "devices", "mesh", "estimate", "advice"))
    if estimate is None:
        return None
    found = {step: figures for step in steps if (figures := _read_json(folder / f"{step}.json", ("step",))) is not None}
    return Answer(estimate, found)


def _read_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and all(key in found for key in keys) else None


def _work(
    request: Request,
    path: Path,
    folder: Path,
    timeout: float,
    progress: Callable[[str], None],
    is_terminated: Callable[[], bool],
) -> str:
    """Run a worker until it exits. -> why it failed, in a few lines; empty on success."""
    log = path.with_name("log.txt")
    command = [sys.executable, "-m", "lmtrain.plan.worker", str(path), str(path.parent)]
    began = compiling_since = time.monotonic()
    try:
        with open(log, "w") as file, _running(command, file, environment(request.target, request.compile)) as process:
            while process.poll() is None:
                if is_terminated():
                    sys.exit(128 + signal.SIGTERM)
                elapsed = time.monotonic() - began
                if not (path.parent / "estimate.json").exists():
                    compiling_since = time.monotonic()
                elif time.monotonic() - compiling_since > timeout:
                    return f"timeout: it took longer than --compile_timeout {timeout:.0f} s"
                progress(_doing(path.parent, request, elapsed))
                time.sleep(_POLL_SECONDS)
            code = process.returncode
    finally:
        _collect(path.parent, folder)  # after an interruption too: the next plan resumes from these files
    if (error := path.with_name("error.txt")).exists():
        raise UserError(error.read_text())
    if code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "the compiler's process was killed (SIGKILL), probably because this machine ran out of memory"
    return quote(log.read_text(errors="replace")) or f"the compiler's process exited with code {code}"


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


@contextlib.contextmanager
def _terminated() -> Iterator[Callable[[], bool]]:
    """Record SIGTERM instead of raising in its handler: an exception while a worker is being started would leave the
    worker running."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def _collect(written: Path, folder: Path) -> None:
    for path in written.iterdir():
        if path.name.endswith((".json", ".hlo.gz")) and path.name != "request.json":
            temporary = folder / f"{path.name}.tmp-{os.getpid()}"
            temporary.write_bytes(path.read_bytes())
            temporary.replace(folder / path.name)


def _doing(folder: Path, request: Request, seconds: float) -> str:
    if not (folder / "estimate.json").exists():
        return f"tracing the model, {seconds:.0f} s"
    steps = request.steps if request.compile else ()
    left = [step for step in steps if not (folder / f"{step}.json").exists()]
    if not left:
        return f"finishing, {seconds:.0f} s"
    if left[0] == "measure":
        return f"running a few steps, {seconds:.0f} s"
    what = {"train": "training", "eval": "evaluation"}[left[0]]
    return f"compiling the {what} step, {seconds:.0f} s"


def quote(text: str) -> str:
    """The lines of a failed worker's output that state the reason: the end of a Python error, without the traceback."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return "\n".join(line[:_QUOTED_LENGTH] for line in lines[-_QUOTED_LINES:])
