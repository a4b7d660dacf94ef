"""Wishes of several processes, as the steps carry them: granted once, at the same step everywhere."""

import jax
import numpy as np
import pytest

from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.step import agreement
from lmtrain.train.step.agreement import Agreement, StopCheck, Wishes

LAYOUT = plan_layout(PartitioningConfig())


def run(process: Agreement, mine: list[Wishes], others: list[Wishes]) -> list[tuple[int, Wishes]]:
    """What a process does after each step, if it wishes the one and another process the other."""
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
        if what != Wishes():
            granted.append((step, what))
        if what.save:
            process.saved(step)
    return granted


def at(steps: int, **wishes: tuple[int, ...]) -> list[Wishes]:
    """The wishes of so many steps: `save=(3, 4)` at steps 3 and 4."""
    return [Wishes(**{name: step in at for name, at in wishes.items()}) for step in range(1, steps + 1)]


def test_one_process_is_granted_its_wish_at_once_and_its_steps_take_none():
    alone = Agreement(ALONE, LAYOUT)
    assert alone.on_devices(Wishes(save=True)) is None
    assert alone.granted(Wishes(save=True)) == Wishes(save=True)
    assert alone.waits(Wishes(wait=True))
    assert not alone.waits(Wishes())


@pytest.mark.parametrize("asking", [True, False])
def test_a_wish_to_save_is_granted_once_one_step_later_to_all(asking):
    """The clock goes on asking until the save; what came with steps before it is no second wish."""
    found = at(8, save=(3, 4)), at(8)
    mine, theirs = found if asking else found[::-1]
    assert run(Agreement(Processes(0, 2), LAYOUT), mine, theirs) == [(4, Wishes(save=True))]


def test_where_all_wait_for_each_step_a_wish_is_granted_after_the_step_it_came_with():
    """Whoever of them has the long steps; and no longer than it says so."""
    mine, theirs = at(9, stop=(4, 8)), at(9, wait=(1, 2, 3, 4))
    assert run(Agreement(Processes(0, 2), LAYOUT), mine, theirs) == [(4, Wishes(stop=True)), (9, Wishes(stop=True))]


def test_a_wish_to_save_and_one_to_stop_of_different_processes_are_both_granted():
    mine, theirs = at(5, save=(3,)), at(5, stop=(3,))
    assert run(Agreement(Processes(1, 2), LAYOUT), mine, theirs) == [(4, Wishes(save=True, stop=True))]


def test_steps_without_wishes_change_nothing():
    process = Agreement(Processes(1, 2), LAYOUT)
    process.learn(1, np.array([1, 0, 0]))
    process.learn(2, None)
    assert process.granted(Wishes()) == Wishes(save=True)
    assert process.granted(Wishes()) == Wishes()


def test_between_batches_one_process_looks_each_time():
    stop = StopRequest()
    check = StopCheck(ALONE, stop)
    check()
    stop.requested = True
    with pytest.raises(StoppedError):
        check()


def test_several_processes_look_rarely_and_all_end_at_the_same_call(monkeypatch):
    """A signal to the other one, which came after call 20."""
    calls = []

    def asked(processes, name, mine):
        calls.append(mine)
        return [mine, len(calls) > 1]

    monkeypatch.setattr(agreement, "gather", asked)
    check = StopCheck(Processes(0, 2), StopRequest())
    for _ in range(31):
        check()
    assert calls == [False]
    with pytest.raises(StoppedError):
        check()
