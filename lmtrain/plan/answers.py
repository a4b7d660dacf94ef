"""Answers of workers: started, watched, quoted when they fail, and kept for the next time the same is asked."""

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.plan.environment import environment
from lmtrain.plan.request import Request

_POLL_SECONDS = 0.05

# Lines of compilers and of JAX that say nothing about why a compile failed.
_NOISE = re.compile(
    r"^(\s|W\d{4}|I\d{4}|WARNING|Jax plugin|Traceback|During handling|The above|For simplicity|-{4,}|$)"
)
_QUOTED_LINES, _QUOTED_LENGTH = 4, 400


@dataclass(frozen=True)
class Answer:
    """What is known: the estimate, figures by step, and why there are no more of them (empty if nothing is missing)."""

    estimate: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    from_cache: bool = False

    def fits(self, capacity: float | None) -> bool | None:
        """Whether all compiled steps fit, by the compilers' figures; by the estimate if none is; None if unknown."""
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
    """The answer to a request, from the cache or by a worker. `progress` is called with a line of text as time goes by.

    A compiler that fails, is killed or takes longer than `timeout` seconds costs the figures it would have given: the
    answer then holds the estimate and the reason. Raises `UserError` for what the user can change.
    """
    folder = cache_folder() / request.key
    steps = request.steps if request.compile else ()
    if (folder / "estimate.json").exists() and all((folder / f"{step}.json").exists() for step in steps):
        return _read(folder, steps, from_cache=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # workers of two plans at once write the same bytes, each file under a name of its own first
    with tempfile.TemporaryDirectory(prefix="lmtrain-plan-") as temporary:
        path = Path(temporary) / "request.json"
        path.write_text(request.to_json())
        failure = _work(request, path, folder, timeout, progress)
    if not (folder / "estimate.json").exists():
        raise UserError(f"the worker that plans the run failed: {failure or 'it wrote nothing'}")
    found = _read(folder, steps, failure=failure)
    return Answer(found.estimate, found.steps, found.failure, time.monotonic() - began)


def read_hlo(request: Request, step: str) -> str | None:
    """The optimized program of an answered request; None if it was not compiled."""
    path = cache_folder() / request.key / f"{step}.hlo.gz"
    return gzip.decompress(path.read_bytes()).decode() if path.exists() else None


def cache_folder() -> Path:
    """Where answers are kept; XDG_CACHE_HOME moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "lmtrain" / "plans"


def _read(folder: Path, steps: tuple[str, ...], failure: str = "", from_cache: bool = False) -> Answer:
    found = {
        step: json.loads((folder / f"{step}.json").read_text()) for step in steps if (folder / f"{step}.json").exists()
    }
    return Answer(json.loads((folder / "estimate.json").read_text()), found, failure, from_cache=from_cache)


def _work(request: Request, path: Path, folder: Path, timeout: float, progress: Callable[[str], None]) -> str:
    """Run a worker to its end. -> why it failed, in a few lines; empty if it did not."""
    log = path.with_name("log.txt")
    command = [sys.executable, "-m", "lmtrain.plan.worker", str(path), str(path.parent)]
    began = compiling_since = time.monotonic()
    with open(log, "w") as file, _running(command, file, environment(request.target, request.compile)) as process:
        while process.poll() is None:
            elapsed = time.monotonic() - began
            if not (path.parent / "estimate.json").exists():
                compiling_since = time.monotonic()
            elif time.monotonic() - compiling_since > timeout:
                _collect(path.parent, folder)
                return f"it took longer than --compile_timeout {timeout:.0f} s and was stopped"
            progress(_doing(path.parent, request, elapsed))
            time.sleep(_POLL_SECONDS)
        code = process.returncode
    _collect(path.parent, folder)
    if (error := path.with_name("error.txt")).exists():
        raise UserError(error.read_text())
    if code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "the compiler's process was killed (SIGKILL): this machine has probably run out of memory"
    return quote(log.read_text(errors="replace")) or f"the compiler's process ended with code {code}"


@contextlib.contextmanager
def _running(command: list[str], log: Any, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive this one."""
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | variables)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _collect(written: Path, folder: Path) -> None:
    for path in written.iterdir():
        if path.name.endswith((".json", ".hlo.gz")) and path.name != "request.json":
            temporary = folder / f"{path.name}.tmp-{os.getpid()}"
            temporary.write_bytes(path.read_bytes())
            temporary.replace(folder / path.name)


def _doing(folder: Path, request: Request, seconds: float) -> str:
    if not (folder / "estimate.json").exists():
        return f"tracing the model, {seconds:.0f} s"
    left = [step for step in request.steps if not (folder / f"{step}.json").exists()]
    if not left:
        return f"finishing, {seconds:.0f} s"
    what = {"train": "training", "eval": "evaluation"}.get(left[0], left[0])
    return f"compiling the {what} step, {seconds:.0f} s"


def quote(text: str) -> str:
    """The lines of a failed worker's output that say why: the last ones of a Python error, without the traceback."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return "\n".join(line[:_QUOTED_LENGTH] for line in lines[-_QUOTED_LINES:])
