"""Requests of several processes, exchanged by the steps: granted once, at the same step in all processes."""

import jax
import numpy as np
import pytest

from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.step.norms import Agreement, Requests

LAYOUT = build_layout(PartitioningConfig())


def run(process: Agreement, mine: list[Requests], others: list[Requests]) -> list[tuple[int, Requests]]:
    """The requests granted to a process, by step, if it requests `mine` and another process `others`."""
    granted, waiting = [], None
    for step, (own, other) in enumerate(zip(mine, others, strict=True), start=1):
        greatest = np.maximum(np.max(jax.device_get(process.on_devices(own)), axis=0), np.array(other, np.int32))
        if waiting is not None:
            process.learn(step - 1, waiting)  # metrics are read a step late
        waiting = greatest
        if process.waits(own):
            process.learn(step, waiting)
            waiting = None
        what = process.granted(own)
        if what != Requests():
            granted.append((step, what))
        if what.save:
            process.saved(step)
    return granted


def at(steps: int, **requests: tuple[int, ...]) -> list[Requests]:
    """The requests at each of `steps` steps: `save=(3, 4)` requests a save at steps 3 and 4."""
    return [Requests(**{name: step in at for name, at in requests.items()}) for step in range(1, steps + 1)]


def test_the_request_of_a_single_process_is_granted_at_once_without_the_step():
    alone = Agreement(ALONE, LAYOUT)
    assert alone.on_devices(Requests(save=True)) is None
    assert alone.granted(Requests(save=True)) == Requests(save=True)
    assert alone.waits(Requests(wait=True))
    assert not alone.waits(Requests())


@pytest.mark.parametrize("asking", [True, False])
def test_a_save_request_is_granted_once_one_step_later_to_all(asking):
    """The clock repeats the request until the save; requests of earlier steps do not cause a second save."""
    found = at(8, save=(3, 4)), at(8)
    mine, theirs = found if asking else found[::-1]
    assert run(Agreement(Processes(0, 2), LAYOUT), mine, theirs) == [(4, Requests(save=True))]


def test_with_long_steps_a_request_is_granted_after_the_same_step():
    """It does not matter which process has the long steps; it applies only while that process requests it."""
    mine, theirs = at(9, stop=(4, 8)), at(9, wait=(1, 2, 3, 4))
    assert run(Agreement(Processes(0, 2), LAYOUT), mine, theirs) == [(4, Requests(stop=True)), (9, Requests(stop=True))]


def test_a_save_request_and_a_stop_request_of_different_processes_are_both_granted():
    mine, theirs = at(5, save=(3,)), at(5, stop=(3,))
    assert run(Agreement(Processes(1, 2), LAYOUT), mine, theirs) == [(4, Requests(save=True, stop=True))]


def test_steps_without_requests_change_nothing():
    process = Agreement(Processes(1, 2), LAYOUT)
    process.learn(1, np.array([1, 0, 0]))
    process.learn(2, None)
    assert process.granted(Requests()) == Requests(save=True)
    assert process.granted(Requests()) == Requests()
