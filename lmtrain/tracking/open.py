"""The trackers of a config, opened for a run; those of TensorBoard and Trackio."""

import contextlib
import importlib.util
import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import run_path
from lmtrain.tracking.config import CustomConfig, TensorboardConfig, TrackerConfig, TrackioConfig, WandbConfig
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.tracker import BackgroundTracker, Tracker


class Trackers:
    """The JSON log and all other trackers as one; empty in all processes of a run except the first."""

    def __init__(self, json_log: JsonLog | None = None, others: Sequence[BackgroundTracker] = ()):
        self._json = json_log
        self._others = others

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
    secrets: Sequence[str] = (),
) -> Trackers:
    """Open all trackers for a run after `step` updates. Those that start slowly do so in the background.

    `on_removed` is called if the log folder is removed while the run writes to it. `secrets` are those of the config.

    Raises `UserError` for a custom tracker that cannot be imported, and for a log that cannot be written.
    """
    log_dir = log_dir.rstrip("/")
    openers = [(config.type, _opener(config, log_dir, run, step, secrets)) for config in configs]
    others = [BackgroundTracker(name, opener) for name, opener in openers if opener is not None]
    path = f"{log_dir}/{run}.metrics.jsonl"
    with remote_errors(f"trainer.log_dir: {path}", "written"):
        return Trackers(JsonLog(path, step, on_removed), others)


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Raise `UserError` for trackers that cannot work here: missing libraries, custom trackers, XLA dumps."""
    for config in configs:
        _opener(config, "", "", 0)


def _opener(
    config: TrackerConfig, log_dir: str, run: str, step: int, secrets: Sequence[str] = ()
) -> Callable[[], Tracker] | None:
    """A function that opens a tracker; only the modules of configured trackers are imported. Raises `UserError`."""
    match config:
        case TensorboardConfig():
            return partial(TensorboardTracker, run_path(config.logdir, run), step)
        case WandbConfig():
            from lmtrain.tracking.provenance import xla_dump_folder
            from lmtrain.tracking.wandb import WandbTracker, check_keywords

            if config.save_xla_dumps:
                xla_dump_folder()
            if config.init:
                check_keywords(config.init)
            return partial(WandbTracker, config, run, log_dir, secrets)
        case TrackioConfig():
            check_installed()
            return partial(TrackioTracker, config, run)
        case CustomConfig():
            from lmtrain.tracking.tracker import check_arguments, import_custom

            custom = import_custom(config.type)
            check_arguments(config.type, custom, config.arguments)
            return partial(custom, run=run, folder=f"{log_dir}/{run}", step=step, **config.arguments)
    return None  # the JSON log is always on, and noop adds nothing


# Maximum seconds of metrics that a killed run loses, also of those before its last checkpoint.
_FLUSH_SECONDS = 10


class TensorboardTracker:
    """Writes to `logdir`. After a restart at `step`, TensorBoard drops what was logged for later steps."""

    def __init__(self, logdir: str, step: int):
        from tensorboardX import SummaryWriter  # slow to import; only the tracker's thread waits for it

        # event files are named by second and host: two starts within one second would share a file
        suffix = f".{os.getpid()}"
        purge_step = step + 1 if step else None
        self._writer = SummaryWriter(logdir, purge_step=purge_step, filename_suffix=suffix, flush_secs=_FLUSH_SECONDS)

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_text(name, str(value))

    def artifact(self, path: str, name: str, kind: str) -> None:
        self._writer.add_text(f"{kind}/{name}", path)  # event files cannot store files, so the path is logged

    def text(self, texts: Mapping[str, str], step: int) -> None:
        for prompt, text in texts.items():
            indented = f"{prompt}{text}".replace("\n", "\n    ")
            self._writer.add_text(f"samples/{prompt}", f"    {indented}", step)  # Markdown: as it is, not formatted

    def finish(self) -> None:
        self._writer.close()


def check_installed() -> None:
    """Raise `UserError` if Trackio is not installed, before training starts."""
    if importlib.util.find_spec("trackio") is None:
        raise UserError("trainer.tracker: type trackio requires Trackio; run `pip install trackio`")


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
