"""Cycles of the learning rate, in integer steps. Plain arithmetic without JAX.

{[warmup or rewarmup] -> [stable] -> [decay]} x number of cycles
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from lmtrain.config.errors import field_error
from lmtrain.optim.config import FractionOrSteps, ScheduleConfig


@dataclass(frozen=True)
class Cycle:
    """Steps `start <= step < end`: `warmup` steps, then steps at the peak rate, then `decay` steps."""

    start: int
    end: int
    warmup: int
    decay: int


def num_steps(length: FractionOrSteps, whole: int) -> int:
    """Convert a length to steps: an int is a number of steps, a float is a fraction of `whole`, rounded down."""
    return length if isinstance(length, int) else int(length * whole)


def plan_cycles(config: ScheduleConfig, num_train_steps: int) -> list[Cycle]:
    """The cycles of a run, which cover all its steps. Fractions in `warmup` and `decay` refer to one cycle.

    Raises a field error for lengths that do not fit.
    """
    points = [0, *_minima(config, num_train_steps)]
    return [_cycle(config, index, start, end) for index, (start, end) in enumerate(pairwise(points))]


def _minima(config: ScheduleConfig, total: int) -> list[int]:
    """The end step of each cycle; the last one is `total`."""
    if isinstance(config.cycles, int):
        if config.cycles > total:
            raise field_error("cycles", f"{config.cycles} cycles do not fit into {total} steps")
        return [total * (index + 1) // config.cycles for index in range(config.cycles)]
    if config.cycles is not None:
        if config.cycles[-1] > total:
            raise field_error("cycles", f"step {config.cycles[-1]} is after the end of the run (step {total})")
        return _ending_at(total, config.cycles)
    if isinstance(config.cycle_length, list):
        ends = list(accumulate(config.cycle_length))
        if ends[-1] > total:
            raise field_error("cycle_length", f"the cycles have {ends[-1]} steps in total, the run has only {total}")
        return _ending_at(total, ends)
    if config.cycle_length is not None:
        length = num_steps(config.cycle_length, total)
        if length < 1:
            raise field_error("cycle_length", f"{config.cycle_length} of {total} steps is less than one step")
        # if the length does not divide the run, the last cycle includes the remaining steps
        return [length * index for index in range(1, total // length)] + [total]
    return [total]


def _ending_at(total: int, ends: list[int]) -> list[int]:
    return ends if ends[-1] == total else [*ends, total]


def _cycle(config: ScheduleConfig, index: int, start: int, end: int) -> Cycle:
    name = "rewarmup" if index else "warmup"
    length = end - start
    where = (
        f"the run ({length} steps)"
        if (start, index) == (0, 0) and not _has_cycles(config)
        else (f"cycle {index + 1} (steps {start} to {end})")
    )
    warmup = num_steps(config.rewarmup if index else config.warmup, length)
    if warmup > length:
        raise field_error(name, f"{warmup} steps are longer than {where}")
    if config.decay is None:
        return Cycle(start, end, warmup, length - warmup)
    decay = num_steps(config.decay, length)
    if decay < 1 and config.lr_schedule != "constant":
        raise field_error("decay", f"{config.decay} is less than one step; for no decay set lr_schedule: constant")
    if warmup + decay > length:
        raise field_error("decay", f"{decay} steps, with {warmup} of {name}, are longer than {where}")
    return Cycle(start, end, warmup, decay)


def _has_cycles(config: ScheduleConfig) -> bool:
    return config.cycles is not None or config.cycle_length is not None
