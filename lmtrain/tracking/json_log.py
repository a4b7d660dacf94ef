"""The metrics of a run as JSON lines, `<log_dir>/<run_id>.metrics.jsonl`: always written, with any tracker.

Generated texts are in `<log_dir>/<run_id>/samples.jsonl`: `{"step": 100, "prompt": "Once", "text": " upon"}`.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from lmtrain.runtime.errors import counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import remove_temporaries, write_atomically


class JsonLog:
    """One object per line: `{"step": 100, "train/loss": 3.1, ...}`.

    `names` are the metrics of step `step` that it already contains.

    Opening it for a run that resumes after `step` updates drops the lines of later steps and a truncated last line, so
    that no metric appears twice, however often a run is killed.

    If its file is removed while the run writes it, it is written again with all its lines, and `on_removed` is called.
    """

    def __init__(self, path: str, step: int, on_removed: Callable[[], None] = lambda: None):
        folder = os.path.dirname(path) or "."
        os.makedirs(folder, exist_ok=True)
        kept: list[str] = []
        self.names: set[str] = set()
        for line, values in _read_lines(path, step):
            kept.append(line)
            if values["step"] == step:
                self.names |= values.keys()
        self._is_new = not kept
        remove_temporaries(folder, os.path.basename(path))  # other runs write to the same folder
        write_atomically(path, "".join(kept).encode(), durable=False)
        self._path = path
        self._folder = folder
        self._on_removed = on_removed
        self._file = _open(path)
        self._size = os.path.getsize(path)  # of complete lines
        self._waiting = bytearray()  # lines that are not written yet
        self._warned = False
        self._samples = os.path.join(path.removesuffix(".metrics.jsonl"), "samples.jsonl")

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        """Ignored: the config is stored in the run's folder and in the checkpoints."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # JSON has no NaN and no infinity
        line = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._waiting += (json.dumps({"step": step, **line}, allow_nan=False) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.error(
                    f"{self._path} cannot be written: {error.strerror or error}; training continues, and metrics "
                    "are kept in memory until the file can be written"
                )

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the first line of a new log; a restart does not repeat it."""
        if self._is_new:
            self.log(values, 0)

    def sync(self) -> None:
        """Flush all lines to disk: called before each checkpoint, which relies on it."""
        with contextlib.suppress(OSError):  # `log` reports these errors
            self._write()
            os.fsync(self._file.fileno())

    def artifact(self, path: str, name: str, kind: str) -> None:
        """Ignored: artifacts stay in the run's folder next to this log."""

    def text(self, texts: Mapping[str, str], step: int) -> None:
        """Append the texts, and drop those of this step and later ones, which a killed run wrote."""
        entries = ({"step": step, "prompt": prompt, "text": text} for prompt, text in texts.items())
        try:
            kept = [line for line, _ in _read_lines(self._samples, step - 1)]
            os.makedirs(os.path.dirname(self._samples), exist_ok=True)
            lines = [*kept, *(json.dumps(entry) + "\n" for entry in entries)]
            write_atomically(self._samples, "".join(lines).encode(), durable=False)
        except OSError as error:
            log.error(f"{self._samples} cannot be written: {error.strerror or error}; training continues")

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._write()
        lost = self._waiting.count(b"\n")
        if lost:
            log.error(f"{self._path}: {counted(lost, 'line')} of metrics could not be written")
        self._file.close()

    def _write(self) -> None:
        """Write pending lines, all or none: what a full disk took of them is removed again."""
        if not self._exists():
            self._restore()
        try:
            if self._file.write(self._waiting) != len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(self._waiting)
        self._waiting.clear()

    def _exists(self) -> bool:
        """Whether the open file is still the one at its path."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _restore(self) -> None:
        """Write the file again, from the removed one, which stays readable as long as it is open."""
        os.makedirs(self._folder, exist_ok=True)
        content = os.pread(self._file.fileno(), self._size, 0)
        write_atomically(self._path, content)
        self._file.close()
        self._file = _open(self._path)
        self._size = len(content)
        log.warning(
            f"{self._path} was removed or replaced while the run writes it; it is written again, with its "
            f"{content.count(10):,} lines. Other files in {self._folder}, such as the earlier lines of the log, are "
            "not restored"
        )
        self._on_removed()


def _open(path: str) -> IO[bytes]:
    return open(path, "a+b", buffering=0)


def read_objects(path: str) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; an empty one for a line that is none. A last line may be half written."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            elif line.endswith("\n") and not line.isspace():
                yield {}


def _read_lines(path: str, step: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines up to this step, each with its values; a line truncated by a crash is left out."""
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    values = json.loads(line)
                    if line.endswith("\n") and values["step"] <= step:
                        yield line, values
