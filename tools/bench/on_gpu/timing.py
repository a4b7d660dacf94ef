"""Times of functions that run on a device, in turns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax

WARM_UP = 2


@dataclass(frozen=True)
class Pace:
    """How long to measure: until `deadline`, a time of `time.monotonic()`, and at most this number of rounds.

    A round repeats a function for at least `least_seconds`, so that the clock's error does not matter.
    """

    deadline: float
    rounds: int = 7
    least_seconds: float = 0.2

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline


def take_turns(runs: Mapping[Any, Callable[[], Any]], pace: Pace) -> dict[Any, float]:
    """Median seconds of each function over rounds in which they alternate, so that all see the same machine.

    After the deadline no further round starts; there is at least one.
    """
    repeats = {}
    for name, run in runs.items():
        for _ in range(WARM_UP):
            finish(run())
        repeats[name] = max(int(pace.least_seconds / max(_seconds(run, 1), 1e-6)), 1) if pace.has_time else 1
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(pace.rounds):
        if number and not pace.has_time:
            break
        for name, run in runs.items():
            times[name].append(_seconds(run, repeats[name]))
    return {name: median(seconds) for name, seconds in times.items()}


def finish(result: Any) -> None:
    """Wait until the device has computed the result: arrays of JAX, or a tensor of PyTorch."""
    jax.block_until_ready(result)
    if hasattr(result, "cpu"):
        result.cpu()


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        result = run()
    finish(result)
    return (time.perf_counter() - began) / repeats
