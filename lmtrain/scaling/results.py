"""What the runs of a ladder have reached, read from their logs: nothing else keeps the state of a ladder."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lmtrain.checkpoint.discovery import step_folder
from lmtrain.checkpoint.manifest import NAME as MANIFEST
from lmtrain.config.load import load_config
from lmtrain.config.tree import dotted, value_at, walk_leaves
from lmtrain.run.config import RunConfig
from lmtrain.run.run import identity
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import file_size, fill_run_id, join
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.points import Point, best_rates, points, trials
from lmtrain.tracking.json_log import read_objects

LOSS = "eval/loss"
_TRAIN_LOSS = "train/loss"
_SAVED = "checkpoint/blocking_seconds"  # logged after the last save, if it did not fail

# Settings outside the identity of a run that its loss depends on.
_OTHER_SETTINGS = (
    "trainer.num_train_steps",
    "trainer.early_stopping",
    "trainer.mp",
    "trainer.max_eval_batches",
    "z_loss_weight",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The state of a run. `loss` is that after its last step, None before; infinite if it has diverged.

    It is done if it also `is_saved`, with the checkpoint of its last step. `differences` are settings with which it was
    trained instead of those of the ladder; not `is_checked`: its config is not there to compare.
    """

    point: Point
    step: int = 0
    loss: float | None = None
    differences: Sequence[str] = ()
    is_saved: bool = True
    is_checked: bool = True

    @property
    def state(self) -> str:
        if self.differences:
            return "other settings"
        if self.loss == math.inf:
            return "diverged"
        if self.loss is not None:
            return "done" if self.is_saved else "not saved"
        return f"at step {self.step:,}" if self.step else "not started"


@dataclass(frozen=True)
class Results:
    """The state of a ladder. `law` is empty until the learning rates have been tried."""

    trials: Sequence[Result]
    law: Sequence[Result]

    @property
    def all(self) -> list[Result]:
        """All runs in the order in which they are trained, each once."""
        return list({result.point.id: result for result in [*self.trials, *self.law]}.values())


def check_existing(ladder: Ladder) -> None:
    """Raise `UserError` if a run of a learning rate that is not tried yet was trained with other settings."""
    for rate in ladder.rates:
        check(Results([], [read_result(ladder, point) for point in points(ladder, [rate] * len(ladder.sizes))]))


def check(results: Results) -> Results:
    """Raise `UserError` if a run was trained with other settings than those of the ladder."""
    for result in results.all:
        if result.differences:
            raise UserError(
                f"{result.point.id} was trained with other settings: {'; '.join(result.differences[:3])}. Restore the "
                "settings, copy the ladder to another name, or remove the log and the checkpoints of this run"
            )
    return results


def read_results(ladder: Ladder) -> Results:
    """The state of all runs of a ladder that are known so far."""
    tried = [read_result(ladder, point) for point in trials(ladder)]
    rates = best_rates(ladder, losses_of(tried))
    law = [] if rates is None else points(ladder, rates)
    return Results(tried, [read_result(ladder, point) for point in law])


def stages(results: Results) -> list[list[Point]]:
    """The runs that are not done, in stages: those of a stage need only those of earlier ones.

    The runs of the law are known after those that try learning rates, of which those that diverge are not repeated.
    """
    trials = {result.point.id for result in results.trials}
    left = [
        result.point
        for result in results.all
        if result.state != "done" and not (result.state == "diverged" and result.point.id in trials)
    ]
    tried = [point for point in left if point.id in trials]
    others = [point for point in left if point.id not in trials]
    found = [tried, [point for point in others if point.parent is None], [point for point in others if point.parent]]
    return [stage for stage in found if stage]


def losses_of(results: Sequence[Result]) -> dict[str, float]:
    """The losses of the runs that are done, by id; infinite of those that have diverged."""
    ended = ("done", "diverged")
    return {result.point.id: result.loss for result in results if result.state in ended and result.loss is not None}


def read_result(ladder: Ladder, point: Point) -> Result:
    """The state of a run. Raises `UserError` for a log that cannot be read."""
    step, loss, is_saved = 0, None, False
    for values in _read_log(ladder.run.trainer.log_dir, point.id):
        if not isinstance(values.get("step"), int):
            continue
        step = max(step, values["step"])
        is_saved = is_saved or (values["step"] == point.steps and _SAVED in values)
        if values["step"] == point.steps and LOSS in values:
            loss = _finite(values[LOSS])
        elif _TRAIN_LOSS in values:
            loss = None if _finite(values[_TRAIN_LOSS]) < math.inf else math.inf
    config = os.path.join(fill_run_id(ladder.run.trainer.log_dir, point.id), point.id, "config.yaml")
    is_checked = not step or os.path.exists(config)
    other = differences(ladder.load(point.settings, point.id), config) if step and is_checked else []
    if step > point.steps and not other:
        other = [f"{step:,} steps instead of {point.steps:,}"]
    if loss is not None and not is_saved:  # killed before it logged the save
        is_saved = is_complete(step_folder(ladder.run.trainer.checkpointer.run_folder(point.id), point.steps))
    return Result(point=point, step=step, loss=loss, differences=other, is_saved=is_saved, is_checked=is_checked)


def is_complete(checkpoint: str) -> bool:
    """Whether the folder, at a path or URL, is a complete checkpoint."""
    return file_size(join(checkpoint, MANIFEST)) is not None


def _finite(loss: Any) -> float:
    """A loss of a log, in which null is one that is not finite."""
    return loss if isinstance(loss, float) and 0 < loss < math.inf else math.inf


class Measured(NamedTuple):
    """The speed of a run: the median FLOP/s of one of its devices."""

    flops_per_second: float
    devices: int
    device: str


def read_speed(log_dir: str, run: str) -> Measured:
    """The speed of a run. Raises `UserError` if its log is missing or has none."""
    rates: list[float] = []
    facts: dict[str, Any] = {}
    for values in _read_log(log_dir, run):
        facts = facts or values
        if rate := values.get("throughput/gflops_per_second"):
            rates.append(1e9 * rate)
    devices = facts.get("throughput/device_count")
    if not rates or not devices:
        raise UserError(f"{run} has no log with its speed in {fill_run_id(log_dir, run)}")
    return Measured(median(rates) / devices, devices, str(facts["throughput/device_kind"]))


def _read_log(log_dir: str, run: str) -> Iterator[dict[str, Any]]:
    """The lines of the log of a run; none if it has none."""
    path = os.path.join(fill_run_id(log_dir, run), f"{run}.metrics.jsonl")
    try:
        yield from read_objects(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def differences(expected: RunConfig, saved: str) -> list[str]:
    """Settings with which a run was trained that its loss depends on, instead of those expected."""
    try:
        ours, theirs = (described(config) for config in (expected, load_config(RunConfig, saved).config))
    except UserError as error:
        return [f"{saved} cannot be read: {str(error).splitlines()[-1].strip()}"]
    return [f"{name} {their} instead of {our}" for name, our, their in compared(ours, theirs)]


def compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The name and both values of settings that differ; those that one of them has not are `unset`."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name, "unset"), theirs.get(name, "unset")


def described(config: RunConfig) -> dict[str, Any]:
    """What a loss depends on, by dotted name: the identity of the run, and further settings."""
    plain = config.model_dump(mode="json")
    found = {dotted(path): value for path, value in walk_leaves(identity(config))}
    data = redact(config.data.model_dump(mode="json"))
    found |= {f"data.{name}": data[name] for name in ("validation_urls", "train_urls", "id", "tokenizer")}
    return found | {name: value_at(plain, tuple(name.split("."))) for name in _OTHER_SETTINGS}
