"""What a report shows about a run, read from its files. A run may still be running, or may have been killed."""

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

import yaml

from lmtrain.config.errors import UserError
from lmtrain.config.yaml_scalars import Loader
from lmtrain.report.charts import GOODPUT, TOKENS, is_wanted
from lmtrain.report.curve import Curve, Thinner
from lmtrain.report.find import RunFiles
from lmtrain.report.samples import NAME as SAMPLES
from lmtrain.report.samples import Sample, read_samples
from lmtrain.tracking.goodput import NAME, Attempt, read_attempts, total_seconds

_LINES_BETWEEN_FOLDS = 16_384
_LARGEST_STEP = 2**53


@dataclass(frozen=True)
class Run:
    """A run: `curves` of its log by metric; `facts` from its first line; `notices` list missing and corrupt files."""

    name: str
    files: RunFiles
    curves: dict[str, Curve]
    facts: dict[str, Any]
    last_step: int
    attempts: list[Attempt] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_text: str | None = None
    notices: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def restarts(self) -> list[int]:
        """The steps from which the run resumed."""
        return [attempt.first_step for attempt in self.attempts[1:]]

    @property
    def fractions(self) -> dict[str, float]:
        """Fractions of the wall time by kind: from the ledger, or the last ones in the log."""
        seconds = total_seconds(self.attempts) if self.attempts else {}
        total = sum(seconds.values())
        if total > 0:
            return {kind: value / total for kind, value in seconds.items()}
        logged = {name.removeprefix(GOODPUT): curve.last for name, curve in self.curves.items() if _is_goodput(name)}
        return {kind: value for kind, value in logged.items() if math.isfinite(value) and value >= 0}


def read_run(files: RunFiles, name: str) -> Run:
    """Read the files of a run. Raises `UserError` if the log cannot be read or contains no metric."""
    notices: list[str] = []
    curves, facts, last_step = _read_log(files.metrics, notices)
    attempts = _read_ledger(os.path.join(files.folder, NAME), notices)
    text, config = _read_config(os.path.join(files.folder, "config.yaml"), notices)
    samples = read_samples(os.path.join(files.folder, SAMPLES), notices)
    return Run(name, files, curves, facts, last_step, attempts, config, text, notices, samples)


def _read_log(path: str, notices: list[str]) -> tuple[dict[str, Curve], dict[str, Any], int]:
    """Read a log line by line, in memory that does not grow with the log."""
    thinners: dict[str, Thinner | None] = {}  # None for metrics that no plot has
    facts: dict[str, Any] = {}
    last_step = unreadable = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                line = _parse(text)
                if line is None:
                    unreadable += text.endswith("\n") and not text.isspace()  # a last line may be half written
                    continue
                step = line.pop("step")
                last_step = max(last_step, step)
                for metric, value in line.items():
                    if metric not in thinners:
                        thinners[metric] = Thinner() if is_wanted(metric) else None
                    thinner = thinners[metric]
                    if thinner is None:
                        if step == 0 and number == 1:
                            facts[metric] = value
                    elif value is None or type(value) is float or type(value) is int:
                        thinner.steps.append(step)
                        thinner.values.append(math.nan if value is None else _float(value))
                if number % _LINES_BETWEEN_FOLDS == 0:
                    for each in filter(None, thinners.values()):
                        each.fold()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    curves = {metric: thinner.curve() for metric, thinner in thinners.items() if thinner is not None}
    curves = {metric: curve for metric, curve in curves.items() if len(curve.mean_steps)}
    if all(_is_goodput(metric) or metric == TOKENS for metric in curves):
        reason = "the run has not finished a step yet"
        if unreadable:
            reason = f"{unreadable} of its lines are not JSON objects with a step"
        raise UserError(f"{path} has no metric that a report shows; {reason}")
    if unreadable:
        notices.append(f"{unreadable:,} lines of {path} are not JSON objects with a step, and are left out")
    return curves, facts, last_step


def _parse(text: str) -> dict[str, Any] | None:
    """The object on a line; None for a line that is not an object with a step."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    step = line.get("step")
    if isinstance(step, float) and step.is_integer():
        step = line["step"] = int(step)
    return line if type(step) is int and 0 <= step < _LARGEST_STEP else None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _is_goodput(metric: str) -> bool:
    return metric.startswith(GOODPUT)


def _read_ledger(path: str, notices: list[str]) -> list[Attempt]:
    attempts = read_attempts(path)
    if not attempts:
        what = f"{path} is corrupt" if os.path.exists(path) else f"{path} not found"
        notices.append(f"{what}: restarts and wall times are unknown")
    return attempts


def _read_config(path: str, notices: list[str]) -> tuple[str | None, dict[str, Any] | None]:
    """The text of the config, and its settings; None if there is none or it is not a YAML map."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
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
    return text, config
