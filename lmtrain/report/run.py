"""What a report shows about a run, found and read from its files. A run may still be running, or was killed."""

import math
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from lmtrain.config.yaml_loader import Loader
from lmtrain.report.charts import TOKENS, is_wanted
from lmtrain.report.curve import Curve, thin
from lmtrain.runtime.errors import UserError, counted, suggest_name
from lmtrain.runtime.redact import find_secrets, redact, without
from lmtrain.tracking.goodput import NAME as LEDGER
from lmtrain.tracking.goodput import Attempt, read_attempts, total_seconds
from lmtrain.tracking.json_log import read_objects

_ENDING = ".metrics.jsonl"
_MAX_LISTED = 20


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. `metrics` exists; `folder`, with the config and the goodput ledger, may be missing."""

    id: str
    metrics: str
    folder: str


def find_run(name: str, log_dir: str) -> RunFiles:
    """The run called `name`: a metrics.jsonl, `<log_dir>/<run_id>`, a run id, or a unique prefix of one.

    Raises `UserError` with the existing runs.
    """
    if "://" in name:
        raise UserError(f"{name}: reports read local files; copy <run_id>{_ENDING} and <run_id>/ here first")
    log_dir = os.path.expanduser(log_dir)
    base = os.path.expanduser(name).rstrip("/") or name
    for path in (base, f"{base}{_ENDING}", f"{os.path.abspath(base)}{_ENDING}", os.path.join(log_dir, base + _ENDING)):
        if os.path.isfile(path):
            return _files(path)
    folder = os.path.dirname(base) or log_dir
    matching = [run for run in _ids(folder) if run.startswith(os.path.basename(base))]
    if len(matching) == 1:
        return _files(os.path.join(folder, matching[0] + _ENDING))
    if matching and os.path.basename(base):
        raise UserError(f"{name} is ambiguous: {', '.join(matching[:_MAX_LISTED])}")
    raise UserError(_unknown(name, base, log_dir))


def find_runs(names: Sequence[str], log_dir: str) -> list[RunFiles]:
    """All runs in the order of their names. Raises `UserError` for a run that is named twice."""
    runs = [find_run(name, log_dir) for name in names]
    seen: dict[str, str] = {}
    for name, files in zip(names, runs, strict=True):
        path = os.path.realpath(files.metrics)
        if path in seen:
            raise UserError(f"{seen[path]} and {name} are the same run: {files.metrics}")
        seen[path] = name
    return runs


def name_runs(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its id, and for runs with the same id the part of the path in which they differ."""
    names = []
    for run in runs:
        folders = [os.path.dirname(os.path.abspath(other.metrics)) for other in runs if other.id == run.id]
        folder = os.path.dirname(os.path.abspath(run.metrics))
        # logs in one folder differ in the ending of their names
        where = os.path.relpath(folder, os.path.commonpath(folders)) if folders.count(folder) == 1 else run.metrics
        names.append(run.id if len(folders) == 1 else f"{run.id} ({where})")
    return names


def _files(metrics: str) -> RunFiles:
    name = os.path.basename(metrics)
    run = name.removesuffix(_ENDING) if name.endswith(_ENDING) else os.path.splitext(name)[0]
    return RunFiles(run, metrics, os.path.join(os.path.dirname(metrics), run))


def _unknown(name: str, base: str, log_dir: str) -> str:
    """The message for an unknown run, with the runs of the folder that was named or that contains the named run."""
    folder = base if os.path.isdir(base) and _ids(base) else os.path.dirname(base) or log_dir
    ids = _ids(folder)
    if not ids:
        return f"run {name} not found: no {base}{_ENDING}, and no *{_ENDING} in {folder}; --log_dir sets the folder"
    last = os.path.basename(base).removesuffix(_ENDING)
    hint = suggest_name(last, ids)
    more = f", and {len(ids) - _MAX_LISTED} more" if len(ids) > _MAX_LISTED else ""
    listed = f"runs in {folder}: {', '.join(ids[:_MAX_LISTED])}{more}"
    return f"run {name} not found; " + (f"did you mean {hint!r}? " if hint else "") + listed


def _ids(folder: str) -> list[str]:
    """Ids of the runs in a folder of logs, newest first."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(_ENDING) and entry.is_file()]
    except OSError:
        return []
    entries.sort(key=lambda entry: (-entry.stat().st_mtime, entry.name))
    return [entry.name.removesuffix(_ENDING) for entry in entries]


_MAX_STEP = 2**53


Samples = dict[str, dict[int, str]]  # generated texts by prompt, then by the number of updates


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run: `curves` of its log by metric; `facts` from its first line; `notices` list missing and corrupt files."""

    name: str
    files: RunFiles
    curves: dict[str, Curve]
    facts: dict[str, Any]
    last_step: int
    attempts: list[Attempt]
    config: dict[str, Any] | None
    config_text: str | None
    notices: list[str]
    samples: Samples

    @property
    def restarts(self) -> list[int]:
        """The steps from which the run resumed."""
        return [attempt.first_step for attempt in self.attempts[1:]]

    @property
    def fractions(self) -> dict[str, float]:
        """Fractions of the wall time by kind; empty without a ledger."""
        seconds = total_seconds(self.attempts)
        total = sum(seconds.values())
        return {kind: value / total for kind, value in seconds.items()} if total > 0 else {}


def read_run(files: RunFiles, name: str) -> LoggedRun:
    """Read the files of a run. Raises `UserError` if the log cannot be read or contains no metric."""
    notices: list[str] = []
    curves, facts, last_step = _read_log(files.metrics, notices)
    attempts = _read_ledger(os.path.join(files.folder, LEDGER), notices)
    text, config = _read_config(os.path.join(files.folder, "config.yaml"), notices)
    samples = read_samples(os.path.join(files.folder, "samples.jsonl"), notices)
    return LoggedRun(
        name=name,
        files=files,
        curves=curves,
        facts=facts,
        last_step=last_step,
        attempts=attempts,
        config=config,
        config_text=text,
        notices=notices,
        samples=samples,
    )


def read_samples(path: str, notices: list[str]) -> Samples:
    """The generated texts of a run; of several for one prompt and step, the last. Empty if there is no file.

    Adds a notice for lines that are not samples.
    """
    samples: Samples = {}
    unreadable = 0
    try:
        for entry in read_objects(path):
            step, prompt, text = (entry.get(name) for name in ("step", "prompt", "text"))
            if type(step) is int and isinstance(prompt, str) and isinstance(text, str):
                samples.setdefault(prompt, {})[step] = text
            else:
                unreadable += 1
    except FileNotFoundError:
        return {}
    except OSError as error:
        notices.append(f"{path} cannot be read: {error.strerror or error}")
    if unreadable:
        notices.append(f"left out of {path}: {counted(unreadable, 'line')} without a sample")
    return samples


def _read_log(path: str, notices: list[str]) -> tuple[dict[str, Curve], dict[str, Any], int]:
    """Read a log line by line; a value takes 16 bytes of memory until its metric is thinned."""
    values: defaultdict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    facts: dict[str, Any] = {}
    last_step = unreadable = 0
    try:
        for number, line in enumerate(read_objects(path)):
            step = line.pop("step", None)
            if type(step) not in (int, float) or not 0 <= step < _MAX_STEP or step % 1:
                unreadable += 1
                continue
            last_step = max(last_step, int(step))
            for metric, value in line.items():
                if not is_wanted(metric):
                    if number == step == 0:
                        facts[metric] = value
                elif value is None or type(value) in (int, float):
                    steps, column = values[metric]
                    steps.append(int(step))
                    # an integer of any length is valid JSON
                    column.append(math.nan if value is None or abs(value) > sys.float_info.max else value)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    left_out = f"{counted(unreadable, 'line')} without a JSON object with a step"
    if not values.keys() - {TOKENS}:
        reason = f"left out: {left_out}" if unreadable else "the run has not finished a step yet"
        raise UserError(f"{path} has no metric that a report shows; {reason}")
    if unreadable:
        notices.append(f"left out of {path}: {left_out}")
    return {metric: thin(*columns) for metric, columns in values.items()}, facts, last_step


def _read_ledger(path: str, notices: list[str]) -> list[Attempt]:
    attempts = read_attempts(path)
    if not attempts:
        problem = f"{path} is corrupt" if os.path.exists(path) else f"{path} not found"
        notices.append(f"{problem}: restarts and wall times are unknown")
    return attempts


def _read_config(path: str, notices: list[str]) -> tuple[str | None, dict[str, Any] | None]:
    """The text of the config, and its settings; None if there is none or it is not a YAML map."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = redact(file.read())
    except OSError:
        notices.append(f"{path} not found: the settings of the run are unknown")
        return None, None
    try:
        config = yaml.load(text, Loader)  # lmtrain's subclass of a safe loader
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        notices.append(f"{path} is not a YAML map: it is shown, but not compared")
        return text, None
    return without(text, find_secrets(config)), redact(config)  # earlier versions saved some
