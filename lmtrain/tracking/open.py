"""The trackers of a config, opened for a run."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.runtime.run_path import run_path
from lmtrain.tracking.background import BackgroundTracker
from lmtrain.tracking.config import CustomConfig, TensorboardConfig, TrackerConfig, TrackioConfig, WandbConfig
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.tracker import Tracker


class Trackers:
    """The JSON log and all other trackers as one; empty in all processes of a run except the first."""

    def __init__(self, json_log: JsonLog | None = None, others: Sequence[BackgroundTracker] = ()):
        self._json = json_log
        self._others = others

    @property
    def losses(self) -> Sequence[float]:
        """Training losses of the steps before a resumed run continues."""
        return [] if self._json is None else self._json.losses

    @property
    def names(self) -> set[str]:
        """Names of the metrics already logged for the last step before a resumed run continues."""
        return set() if self._json is None else self._json.names

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._each("hyperparameters", config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each("log", metrics, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._each("summary", values)

    def artifact(self, path: str, name: str, kind: str) -> None:
        self._each("artifact", path, name, kind)

    def text(self, texts: Mapping[str, str], step: int) -> None:
        self._each("text", texts, step)

    def _each(self, verb: str, *arguments: Any) -> None:
        if self._json is not None:
            getattr(self._json, verb)(*arguments)
        for tracker in self._others:
            tracker.call(verb, *arguments)

    def sync(self) -> None:
        if self._json is not None:
            self._json.sync()

    def finish(self) -> None:
        """Finish all trackers concurrently, so that several hanging ones take no longer than one."""
        threads = [threading.Thread(target=tracker.finish) for tracker in self._others]
        for thread in threads:
            thread.start()
        if self._json is not None:
            self._json.finish()
        for thread in threads:
            thread.join()


def open_trackers(
    configs: Sequence[TrackerConfig],
    log_dir: str,
    run: str,
    step: int,
    on_removed: Callable[[], None] = lambda: None,
) -> Trackers:
    """Open all trackers for a run after `step` updates. Those that start slowly do so in the background.

    `on_removed` is called if the log folder is removed while the run writes to it.

    Raises `UserError` for a custom tracker that cannot be imported, and for a log that cannot be written.
    """
    log_dir = log_dir.rstrip("/")
    openers = [(config.type, _opener(config, log_dir, run, step)) for config in configs]
    others = [BackgroundTracker(name, opener) for name, opener in openers if opener is not None]
    path = f"{log_dir}/{run}.metrics.jsonl"
    try:
        return Trackers(JsonLog(path, step, on_removed), others)
    except OSError as error:
        raise UserError(f"trainer.log_dir: {path} cannot be written: {error.strerror or error}") from None


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raise `UserError` for trackers that cannot work here: missing libraries, custom trackers, XLA dumps."""
    for config in configs:
        _opener(config, "", "", 0)


def _opener(config: TrackerConfig, log_dir: str, run: str, step: int) -> Callable[[], Tracker] | None:
    """A function that opens a tracker; only the modules of configured trackers are imported. Raises `UserError`."""
    match config:
        case TensorboardConfig():
            from lmtrain.tracking.tensorboard import TensorboardTracker

            return partial(TensorboardTracker, run_path(config.logdir, run), step)
        case WandbConfig():
            from lmtrain.tracking.provenance import xla_dump_folder
            from lmtrain.tracking.wandb import WandbTracker, check_settings

            if config.save_xla_dumps:
                xla_dump_folder()
            if config.settings:
                check_settings(config.settings)
            return partial(WandbTracker, config, run, log_dir)
        case TrackioConfig():
            from lmtrain.tracking.trackio import TrackioTracker, check_installed

            check_installed()
            return partial(TrackioTracker, config, run)
        case CustomConfig():
            from lmtrain.tracking.custom import check_arguments, import_custom

            custom = import_custom(config.type)
            check_arguments(config.type, custom, config.arguments)
            return partial(custom, run=run, folder=f"{log_dir}/{run}", step=step, **config.arguments)
    return None  # the JSON log is always on, and noop adds nothing
