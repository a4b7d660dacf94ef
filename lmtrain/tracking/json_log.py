"""The metrics of a run as JSON lines, `<log_dir>/<run_id>.metrics.jsonl`: always written, with any tracker.

Generated texts are in `<log_dir>/<run_id>/samples.jsonl`: `{"step": 100, "prompt": "Once", "text": " upon"}`.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from lmtrain.runtime.atomic_files import write_atomically
from lmtrain.runtime.logging import log


class JsonLog:
    """One object per line: `{"step": 100, "train/loss": 3.1, ...}`.

    `losses` are the training losses of the steps that it already contains, `names` the metrics of step `step`.

    Opening it for a run that resumes after `step` updates drops the lines of later steps and a truncated last line, so
    that no metric appears twice, however often a run is killed.
    """

    def __init__(self, path: str, step: int):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        kept = _lines_until(path, step)
        self.losses = _losses(kept)
        self.names = _names(kept, step)
        self._is_new = not kept
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
        os.replace(temporary, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by finish
        self._whole = os.path.getsize(path)  # bytes of complete lines
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
                    f"{self._file.name} cannot be written: {error.strerror or error}; training continues, and metrics "
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
            kept = _lines_until(self._samples, step - 1)
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
            log.error(f"{self._file.name}: {lost} lines of metrics could not be written")
        self._file.close()

    def _write(self) -> None:
        """Write pending lines; a line that is written only in part is removed again."""
        while self._waiting:
            try:
                written = self._file.write(self._waiting) or 0
            except OSError:
                os.ftruncate(self._file.fileno(), self._whole)
                raise
            if written < len(self._waiting):  # a partial write: the disk is full
                whole = self._waiting.rfind(b"\n", 0, written) + 1
                os.ftruncate(self._file.fileno(), self._whole + whole)
                self._whole += whole
                del self._waiting[:whole]
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._whole += written
            self._waiting.clear()


def _lines_until(path: str, step: int) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line for line in file if _step_of(line) <= step]


def _losses(lines: list[str]) -> list[float]:
    values = [json.loads(line).get("train/loss") for line in lines]
    return [value for value in values if value is not None]


def _names(lines: list[str], step: int) -> frozenset[str]:
    return frozenset(name for line in lines if _step_of(line) == step for name in json.loads(line))


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line truncated by a crash."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
