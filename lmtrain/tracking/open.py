"""The trackers of a config, opened for a run."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.runtime.run_path import run_path
from lmtrain.tracking.config import CustomConfig, TensorboardConfig, TrackerConfig, TrackioConfig, WandbConfig
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.tracker import Tracker


class Trackers:
    """The JSON log and all other trackers as one; empty in all processes of a run except the first."""

    def __init__(self, json_log: JsonLog | None = None, others: Sequence[Tracker] = ()):
        self._json = json_log
        self._all: list[Tracker] = [*([json_log] if json_log else []), *others]

    @property
    def losses(self) -> Sequence[float]:
        """Training losses of the steps before a resumed run continues."""
        return [] if self._json is None else self._json.losses

    @property
    def names(self) -> frozenset[str]:
        """Names of the metrics already logged for the last step before a resumed run continues."""
        return frozenset() if self._json is None else self._json.names

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        for tracker in self._all:
            tracker.hyperparameters(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._all:
            tracker.log(metrics, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        for tracker in self._all:
            tracker.summary(values)

    def artifact(self, path: str, name: str, kind: str) -> None:
        for tracker in self._all:
            tracker.artifact(path, name, kind)

    def text(self, texts: Mapping[str, str], step: int) -> None:
        for tracker in self._all:
            tracker.text(texts, step)

    def sync(self) -> None:
        if self._json is not None:
            self._json.sync()

    def finish(self) -> None:
        """Finish all trackers concurrently, so that several hanging ones take no longer than one."""
        threads = [threading.Thread(target=tracker.finish) for tracker in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def open_trackers(configs: Sequence[TrackerConfig], log_dir: str, run: str, step: int) -> Trackers:
    """Open all trackers for a run after `step` updates. Those that start slowly do so in the background.

    Raises `UserError` for a custom tracker that cannot be imported, and for a log that cannot be written.
    """
    others = []
    for config in configs:
        opener = _opener(config, log_dir, run, step)
        if opener is not None:
            from lmtrain.tracking.background import BackgroundTracker

            others.append(BackgroundTracker(config.type, opener))
    path = f"{log_dir.rstrip('/')}/{run}.metrics.jsonl"
    try:
        return Trackers(JsonLog(path, step), others)
    except OSError as error:
        raise UserError(f"trainer.log_dir: {path} cannot be written: {error.strerror or error}") from None


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raise `UserError` for trackers that cannot work here: missing libraries, custom trackers, XLA dumps."""
    for config in configs:
        match config:
            case TrackioConfig():
                from lmtrain.tracking.trackio import check_installed

                check_installed()
            case CustomConfig():
                from lmtrain.tracking.custom import check_arguments, import_custom

                check_arguments(config.type, import_custom(config.type), config.arguments)
            case WandbConfig():
                if config.save_xla_dumps:
                    from lmtrain.tracking.provenance import xla_dump_folder

                    xla_dump_folder()
                if config.settings:
                    from lmtrain.tracking.wandb import check_settings

                    check_settings(config.settings)


def _opener(config: TrackerConfig, log_dir: str, run: str, step: int) -> Callable[[], Tracker] | None:
    """A function that opens a tracker; only the modules of configured trackers are imported."""
    if isinstance(config, TensorboardConfig):
        from lmtrain.tracking.tensorboard import TensorboardTracker

        logdir = run_path(config.logdir, run)
        return lambda: TensorboardTracker(logdir, step)
    if isinstance(config, WandbConfig):
        from lmtrain.tracking.wandb import WandbTracker

        return lambda: WandbTracker(config, run, log_dir)
    if isinstance(config, TrackioConfig):
        from lmtrain.tracking.trackio import TrackioTracker

        return lambda: TrackioTracker(config, run)
    if isinstance(config, CustomConfig):
        from lmtrain.tracking.custom import import_custom

        custom = import_custom(config.type)
        folder = f"{log_dir.rstrip('/')}/{run}"
        return lambda: custom(run=run, folder=folder, step=step, **config.arguments)
    return None  # the JSON log is always on, and noop adds nothing
