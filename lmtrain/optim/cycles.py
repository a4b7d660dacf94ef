"""Cycles of the learning rate, in integer steps. Plain arithmetic without JAX.

{[warmup or rewarmup] -> [stable] -> [decay]} x number of cycles
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from lmtrain.config.counts import counted
from lmtrain.config.errors import field_error
from lmtrain.optim.config import FractionOrSteps, ScheduleConfig

_MAX_CYCLES = 10_000


@dataclass(frozen=True)
class Cycle:
    """Steps `start <= step < end`: `warmup` steps, then steps at the peak rate, then `decay` steps."""

    start: int
    end: int
    warmup: int
    decay: int


def num_steps(length: FractionOrSteps, total: int) -> int:
    """Convert a length to steps: an int is a number of steps, a float is a fraction of `total`, rounded down."""
    return length if isinstance(length, int) else int(length * total)


def build_cycles(config: ScheduleConfig, num_train_steps: int) -> list[Cycle]:
    """The cycles of a run, which cover all its steps. Fractions in `warmup` and `decay` refer to one cycle.

    Raises a field error for lengths that do not fit.
    """
    points = [0, *_ends(config, num_train_steps)]
    return [_cycle(config, index, start, end) for index, (start, end) in enumerate(pairwise(points))]


def _ends(config: ScheduleConfig, total: int) -> list[int]:
    """The end step of each cycle; the last one is `total`."""
    cycles, length = config.cycles, config.cycle_length
    each = num_steps(length, total) if isinstance(length, int | float) else None
    number = total // each if each else cycles if isinstance(cycles, int) else 1
    if number > _MAX_CYCLES:
        name = "cycles" if length is None else "cycle_length"
        raise field_error(name, f"{number:,} cycles; expected at most {_MAX_CYCLES:,}")
    if isinstance(cycles, int):
        if cycles > total:
            raise field_error("cycles", f"{cycles} cycles do not fit into {counted(total, 'step')}")
        return [total * (index + 1) // cycles for index in range(cycles)]
    if cycles is not None:
        if cycles[-1] > total:
            raise field_error("cycles", f"step {cycles[-1]} is after the end of the run (step {total})")
        ends = cycles
    elif isinstance(length, list):
        ends = list(accumulate(length))
        if ends[-1] > total:
            lengths = counted(ends[-1], "step")
            raise field_error("cycle_length", f"the cycles have {lengths} in total, the run has only {total}")
    elif length is not None:
        steps = num_steps(length, total)
        if steps < 1:
            raise field_error("cycle_length", f"{length} of {counted(total, 'step')} is less than one step")
        # if the length does not divide the run, the last cycle includes the remaining steps
        ends = [steps * index for index in range(1, total // steps)]
    else:
        ends = []
    return ends if ends and ends[-1] == total else [*ends, total]


def _cycle(config: ScheduleConfig, index: int, start: int, end: int) -> Cycle:
    length = end - start
    has_cycles = config.cycles is not None or config.cycle_length is not None
    where = f"cycle {index + 1} (steps {start} to {end})" if has_cycles else f"the run ({counted(length, 'step')})"
    name = "rewarmup" if index else "warmup"
    warmup = num_steps(config.rewarmup if index else config.warmup, length)
    if warmup > length:
        raise field_error(name, f"{counted(warmup, 'step')}, longer than {where}")
    if config.decay_length is None:
        return Cycle(start, end, warmup, length - warmup)
    decay = num_steps(config.decay_length, length)
    if decay < 1 and config.lr_schedule != "constant":
        raise field_error(
            "decay", f"{config.decay_length} is less than one step; for no decay set lr_schedule: constant"
        )
    if warmup + decay > length:
        raise field_error("decay", f"{counted(decay, 'step')}, with {warmup:,} of {name}, longer than {where}")
    return Cycle(start, end, warmup, decay)
