"""The points of a ladder: ordinary runs, each a config and settings on the command line.

With `wsd`, the longest run of a size (of one seed and learning rate) keeps the checkpoints at which the decays of the
shorter ones begin. These branch off with `trainer.initialize_from`, and end with the same bytes as a run of that length
from the start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.optim.config import num_steps
from lmtrain.runtime.errors import UserError, counted, suggest_name
from lmtrain.runtime.redact import redact
from lmtrain.scaling.config import as_arguments
from lmtrain.scaling.ladder import Ladder, training_flops

_MIN_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run. `settings` are those on the command line, by dotted name.

    `parameters` and `tokens` are N and D of the law. `parent` is the id of the run from whose checkpoint of step
    `start` it branches off. `rate` is the learning rate of the smallest size's longest run.
    """

    id: str
    size: int
    ratio: float
    seed: int
    rate: float
    steps: int
    parameters: int
    tokens: int
    flops_per_token: float
    settings: Mapping[str, Any]
    parent: str | None = None
    start: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of its training, without those of its parent."""
        return self.flops_per_token * self.tokens * (self.steps - self.start) / self.steps


def trials(ladder: Ladder) -> list[Point]:
    """The runs that try learning rates, the longest ones of their size; none if there is only one rate.

    That of the best rate is also a point of the law.
    """
    if len(ladder.rates) == 1:
        return []
    sizes = ladder.sizes if ladder.config.tries_at_all else ladder.sizes[:1]
    return [
        _runs(ladder, number, rate, ladder.config.seeds[0])[0] for number in range(len(sizes)) for rate in ladder.rates
    ]


def best_rates(ladder: Ladder, losses: Mapping[str, float]) -> list[float] | None:
    """The learning rate of each size, by the losses of its trials; None if some are missing."""
    tried = trials(ladder)
    if not tried:
        return ladder.rates * len(ladder.sizes)
    if any(trial.id not in losses for trial in tried):
        return None
    if all(losses[trial.id] == math.inf for trial in tried):
        raise UserError(f"{ladder.path}: all learning_rates diverge; add lower ones")
    best = {
        size: min((trial for trial in tried if trial.size == size), key=lambda trial: losses[trial.id]).rate
        for size in {trial.size for trial in tried}
    }
    return [best[0 if ladder.config.transfer else size] for size in range(len(ladder.sizes))]


def points(ladder: Ladder, rates: Sequence[float]) -> list[Point]:
    """All runs of the law with these learning rates, one for each size; a run stands before those that branch off.

    Raises `UserError` for runs that are too short for the schedule.
    """
    return [
        point
        for size, rate in enumerate(rates)
        for seed in ladder.config.seeds
        for point in _runs(ladder, size, rate, seed)
    ]


def arguments_of(ladder: Ladder, point: Point) -> list[str]:
    """The arguments of `lmtrain` that train a run, with its secrets: not for a command line, which others can see."""
    return ["train", *as_arguments(ladder.base.path, {**ladder.config.overrides, **point.settings})]


def public_arguments(ladder: Ladder, point: Point) -> list[str]:
    """Arguments of `lmtrain` that train a run, for a command line: those of a run with secrets refer to the ladder.

    Raises `UserError` if the ladder's own path has secrets.
    """
    settings = {**ladder.config.overrides, **point.settings}
    if redact([ladder.base.path, settings]) == [ladder.base.path, settings]:
        return arguments_of(ladder, point)
    if redact(ladder.path) != ladder.path:
        raise UserError(
            f"{ladder.path}: the runs have secrets, and their commands would need that of this URL; copy the ladder "
            "to a file that only you can read"
        )
    return ["scaling", "run", ladder.path, "--only", point.id, "--vocab_size", str(ladder.vocab_size)]


def find_point(ladder: Ladder, run: str) -> Point:
    """The run of this id, with any of the learning rates. Raises `UserError` if the ladder has none."""
    every = [point for rate in ladder.rates for point in points(ladder, [rate] * len(ladder.sizes))]
    found = next((point for point in every if point.id == run), None)
    if found is None:
        hint = suggest_name(run, [point.id for point in every])
        raise UserError(f"--only {run}: {ladder.path} has no such run" + (f"; did you mean {hint}?" if hint else ""))
    return found


def _runs(ladder: Ladder, number: int, rate: float, seed: int) -> list[Point]:
    """The runs of a size, seed and learning rate, the longest one first."""
    size = ladder.sizes[number]
    ratios = sorted(ladder.config.tokens_per_parameter, reverse=True)
    is_cosine = ladder.config.schedule == "cosine"
    runs = [
        _point(ladder, number, ratio, seed, rate, size.parameters * (ratio if is_cosine else ratios[0]))
        for ratio in ratios
    ]
    for run, longer in zip(runs, [None, *runs], strict=False):
        if run.steps < _MIN_STEPS or (longer and longer.tokens == run.tokens):
            raise UserError(
                f"{ladder.path}: {run.id} has {counted(run.steps, 'step')}: lengths need {_MIN_STEPS} or more, and "
                "different ones; increase tokens_per_parameter, or decrease trainer.train_batch_size"
            )
    return runs if is_cosine else _branch(ladder, runs)


def _point(ladder: Ladder, number: int, ratio: float, seed: int, rate: float, tokens: float) -> Point:
    """A run of a size from the start. `tokens` are those for which its settings are."""
    size = ladder.sizes[number]
    grown = ladder.grown(tokens, rate)
    batch = grown.get("trainer.train_batch_size", ladder.batch_size) * size.model.seq_len
    steps = max(1, round(size.parameters * ratio / batch))
    name = f"{ladder.name}-{size.label}-{ratio:g}x-lr{rate:g}-seed{seed}"
    settings = {
        "trainer.id": name,
        "trainer.seed": seed,
        "trainer.num_train_steps": steps,
        "trainer.checkpointer.keep": [],
        "optimizer.lr_schedule": ladder.config.schedule,
        **grown,
        **size.settings,
        **ladder.transfer_of(ladder.run, size is ladder.sizes[0]),
    }
    flops = training_flops(size.model, ladder.vocab_size)
    return Point(
        id=name,
        size=number,
        ratio=ratio,
        seed=seed,
        rate=rate,
        steps=steps,
        parameters=size.parameters,
        tokens=steps * batch,
        flops_per_token=flops,
        settings=settings,
    )


def _branch(ladder: Ladder, runs: Sequence[Point]) -> list[Point]:
    """The runs of wsd: the first one with checkpoints for the others, which branch off."""
    longest = runs[0]
    warmup = num_steps(ladder.run.optimizer.warmup, longest.steps)
    found, starts = [], []
    for run in runs:
        decay = max(1, round(ladder.config.decay * run.steps))
        start = run.steps - decay
        if warmup > start:
            raise UserError(
                f"{ladder.path}: {run.id} has {run.steps} steps: {warmup} of warmup and {decay} of decay do not fit; "
                "increase tokens_per_parameter, or decrease optimizer.warmup or trainer.train_batch_size"
            )
        settings = {**run.settings, "optimizer.decay": decay, "optimizer.warmup": warmup}
        if run is longest:
            found.append(replace(run, settings=settings))
            continue
        if start < 1 or start in starts:
            raise UserError(
                f"{ladder.path}: {run.id} has {run.steps} steps, too few to differ from the other lengths; increase "
                "tokens_per_parameter, or decrease trainer.train_batch_size"
            )
        starts.append(start)
        folder = ladder.run.trainer.checkpointer.run_folder(longest.id)
        settings["trainer.initialize_from"] = f"{folder.rstrip('/')}/step-{start}"
        found.append(replace(run, settings=settings, parent=longest.id, start=start))
    keep = [{"every": start, "until": start} for start in sorted(starts)]
    found[0] = replace(found[0], settings={**found[0].settings, "trainer.checkpointer.keep": keep})
    return found
