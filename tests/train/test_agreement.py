"""Wishes of several processes, as the steps carry them: granted once, at the same step everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.agreement import WISHES, Agreement, Wishes

LAYOUT = plan_layout(PartitioningConfig())


def run(process: Agreement, wishes: list[Wishes], others: list[int]) -> list[tuple[int, Wishes]]:
    """What a process does after each step, if it wishes this and the greatest wish of the others is that."""
    granted, waiting = [], None
    for step, (mine, theirs) in enumerate(zip(wishes, others, strict=True), start=1):
        batch = process.with_batch({"tokens": None}, mine)
        greatest = max(int(np.max(jax.device_get(batch[WISHES]))), theirs)
        if waiting is not None:
            process.learn(step - 1, waiting)  # metrics are read a step late
        waiting = {WISHES: float(greatest)}
        what = process.granted(mine)
        if what != Wishes():
            granted.append((step, what))
        if what.save:
            process.saved(step)
    return granted


def test_one_process_is_granted_its_wish_at_once_and_its_batches_stay_as_they_are():
    alone = Agreement(ALONE, LAYOUT)
    batch = {"tokens": jnp.zeros(3)}
    assert alone.with_batch(batch, Wishes(save=True)) is batch
    assert alone.granted(Wishes(save=True)) == Wishes(save=True)


@pytest.mark.parametrize("asking", [True, False])
def test_a_wish_to_save_is_granted_once_one_step_later_to_all(asking):
    """The clock goes on asking until the save; what came with steps before it is no second wish."""
    mine = [Wishes(save=asking and step in (3, 4)) for step in range(1, 9)]
    theirs = [0 if asking else int(step in (3, 4)) for step in range(1, 9)]
    assert run(Agreement(Processes(0, 2), LAYOUT), mine, theirs) == [(4, Wishes(save=True))]


def test_a_wish_to_stop_comes_before_one_to_save():
    theirs = [0, 0, 2, 2, 0]
    mine = [Wishes(save=step == 3) for step in range(1, 6)]
    (first, *_) = run(Agreement(Processes(1, 2), LAYOUT), mine, theirs)
    assert first == (4, Wishes(save=False, stop=True))


def test_metrics_do_not_keep_the_wishes():
    process = Agreement(Processes(1, 2), LAYOUT)
    metrics = {WISHES: 1.0, "train/loss": 2.0}
    process.learn(1, metrics)
    assert metrics == {"train/loss": 2.0}
    process.learn(2, {"train/loss": 2.0})
    assert process.granted(Wishes()) == Wishes(save=True)
    assert process.granted(Wishes()) == Wishes()
