"""Trackio tracker. The only module that imports trackio."""

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.tracking.config import TrackioConfig


def check_installed() -> None:
    """Raise `UserError` if Trackio is not installed, before training starts."""
    if importlib.util.find_spec("trackio") is None:
        raise UserError("trainer.tracker: type trackio requires Trackio; run `pip install 'lmtrain[trackio]'`")


class TrackioTracker:
    """Resumes the run of the same name after a restart, without repeating metrics that it already has."""

    def __init__(self, config: TrackioConfig, run: str):
        import trackio  # slow to import; only the tracker's thread waits for it
        from trackio.sqlite_storage import SQLiteStorage

        settings = config.model_dump(exclude={"type", "name"})
        with contextlib.redirect_stdout(io.StringIO()):  # suppress Trackio's hints
            self._run = trackio.init(
                name=config.name or run, embed=False, auto_log_gpu=False, auto_log_cpu=False, **settings
            )
        # A run that was killed after its last checkpoint repeats steps, with the same values. The last step may be
        # stored in part, such as the loss without the evaluation. For a Space this is unknown; it counts as complete.
        self._last = int(getattr(self._run, "_next_step", 0)) - 1
        self._last_has: set[str] | None = None
        if getattr(self._run, "_is_local", False):
            self._last_has = set(SQLiteStorage.get_snapshot(config.project, step=self._last, run_id=self._run.id))

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log what the run does not have yet."""
        if step <= self._last:
            has = self._last_has if step == self._last else None
            metrics = {} if has is None else {name: value for name, value in metrics.items() if name not in has}
        if metrics:
            self._run.log(dict(metrics), step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values))

    def artifact(self, path: str, name: str, kind: str) -> None:
        """Ignored: artifacts stay in the run's log folder, since local Trackio runs cannot store files."""

    def text(self, texts: Mapping[str, str], step: int) -> None:
        import trackio

        rows = [list(pair) for pair in texts.items()]
        self.log({"samples": trackio.Table(columns=["prompt", "text"], data=rows)}, step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
