"""The metrics of a run as JSON lines, `<log_dir>/<run_id>.metrics.jsonl`: always written, whatever tracker is set."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any


class JsonLog:
    """One object per line: `{"step": 100, "train/loss": 3.1, ...}`.

    Opening it for a run that goes on after `step` updates drops the lines of later steps, and a last line that was
    cut off, so that no metric appears twice however often a run is killed.
    """

    def __init__(self, path: str, step: int):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        kept = _lines_until(path, step)
        self._is_new = not kept
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by finish

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        """Not metrics: the config is kept in the checkpoints and given to the other trackers."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # JSON has no word for a number that is none
        line = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """The first line of a new log; a restart does not repeat it."""
        if self._is_new:
            self.log(values, 0)

    def sync(self) -> None:
        """Make sure that all is on disk: called before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()


def _lines_until(path: str, step: int) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line for line in file if _step_of(line) <= step]


def _step_of(line: str) -> float:
    """Infinity for a line that a crash cut off."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
