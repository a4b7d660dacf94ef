"""Saving and loading: bitwise, with temporary checkpoints replaced only by complete ones, and leftovers cleaned."""

import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer, load_arrays, with_shardings
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError

CONFIG = CheckpointerConfig(save_interval="60s", keep=[{"every": 10}])
PARAMS = {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "half": jnp.arange(5, dtype=jnp.bfloat16) / 3}
OPTIMIZER = (jnp.int32(7), {"a": {"kernel": jnp.full((2, 3), jnp.nan)}, "half": jnp.array([jnp.inf, -0.0, 1e-38])})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    """`make()` opens the run's checkpointer; all are closed in the end."""
    opened = []

    def open_one() -> Checkpointer:
        opened.append(Checkpointer(str(tmp_path / "run"), CONFIG, clock))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()


def save(checkpointer: Checkpointer, step: int, kind: Kind) -> None:
    checkpointer.save(step, kind, {"params": PARAMS, "optimizer": OPTIMIZER}, {"identity": {"größe": 1}})


def steps(tmp_path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path / "run"))]


def test_a_folder_that_cannot_be_made_is_told_before_there_is_anything_to_save(make, tmp_path):
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(UserError, match=r"trainer.checkpointer.base_path: .*run cannot be made: File exists"):
        make()


def test_arrays_load_bit_by_bit_as_they_were_saved(make, tmp_path):
    checkpointer = make()
    save(checkpointer, 3, Kind.PERMANENT)
    checkpointer.finish()
    (checkpoint,) = list_checkpoints(str(tmp_path / "run"))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for part, saved in (("params", PARAMS), ("optimizer", OPTIMIZER)):
        like = with_shardings(jax.eval_shape(lambda tree=saved: tree), jax.tree.map(lambda _: device, saved))
        loaded = load_arrays(checkpoint, part, like)
        assert jax.tree.structure(loaded) == jax.tree.structure(saved)
        for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
            assert one.dtype == other.dtype
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_run_info_is_saved_with_step_and_kind(make, tmp_path):
    checkpointer = make()
    save(checkpointer, 3, Kind.TEMPORARY)
    checkpointer.finish()
    (checkpoint,) = list_checkpoints(str(tmp_path / "run"))
    assert checkpoint.read_run_info() == {"identity": {"größe": 1}, "step": 3, "kind": "temporary"}


def test_what_is_saved_is_the_state_at_the_call_not_later(make, tmp_path):
    """The training step donates its state: the buffers are gone right after `save` returns."""
    checkpointer = make()
    params = {"w": jnp.arange(1000.0)}
    checkpointer.save(1, Kind.PERMANENT, {"params": params}, {})
    params["w"].delete()
    checkpointer.finish()
    (checkpoint,) = list_checkpoints(str(tmp_path / "run"))
    like = {
        "w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    }
    np.testing.assert_array_equal(load_arrays(checkpoint, "params", like)["w"], np.arange(1000.0))


def test_a_temporary_checkpoint_goes_only_when_the_next_is_complete(make, tmp_path):
    checkpointer = make()
    save(checkpointer, 1, Kind.TEMPORARY)
    save(checkpointer, 2, Kind.TEMPORARY)
    assert 1 in steps(tmp_path)  # whatever the state of 2
    checkpointer.finish()
    assert steps(tmp_path) == [2]
    save(checkpointer, 10, Kind.PERMANENT)
    checkpointer.finish()
    assert steps(tmp_path) == [10]


def test_permanent_checkpoints_are_never_deleted(make, tmp_path):
    checkpointer = make()
    for step, kind in [(10, Kind.PERMANENT), (13, Kind.TEMPORARY), (20, Kind.PERMANENT), (21, Kind.TEMPORARY)]:
        save(checkpointer, step, kind)
    checkpointer.close()
    assert steps(tmp_path) == [10, 20, 21]


def test_a_temporary_checkpoint_of_an_earlier_process_is_replaced_too(make, tmp_path):
    first = make()
    save(first, 10, Kind.PERMANENT)
    save(first, 12, Kind.TEMPORARY)
    first.finish()
    second = make()
    assert steps(tmp_path) == [10, 12]
    save(second, 14, Kind.TEMPORARY)
    second.finish()
    assert steps(tmp_path) == [10, 14]


def test_due_counts_from_the_start_and_then_from_the_last_save(make, clock):
    checkpointer = make()
    clock.now = 59.0
    assert checkpointer.due(1, last=False) is None
    clock.now = 60.0
    assert checkpointer.due(2, last=False) is Kind.TEMPORARY
    save(checkpointer, 2, Kind.TEMPORARY)
    clock.now = 119.0
    assert checkpointer.due(3, last=False) is None
    assert checkpointer.due(10, last=False) is Kind.PERMANENT
    assert checkpointer.due(3, last=True) is Kind.PERMANENT
    clock.now = 120.0
    assert checkpointer.due(4, last=False) is Kind.TEMPORARY


@pytest.mark.parametrize("name", ["step-20.orbax-checkpoint-tmp-1", "deleting-step-20"])
def test_leftovers_are_never_found_and_go_at_the_next_start(make, tmp_path, name):
    checkpointer = make()
    save(checkpointer, 10, Kind.PERMANENT)
    checkpointer.finish()
    shutil.copytree(tmp_path / "run" / "step-10", tmp_path / "run" / name)
    assert steps(tmp_path) == [10]
    make()
    assert os.listdir(tmp_path / "run") == ["step-10"]


def test_a_process_killed_while_saving_leaves_nothing_that_looks_whole(make, tmp_path):
    script = f"""
import os, signal, jax.numpy as jnp
import orbax.checkpoint as ocp
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.policies import Kind
checkpointer = Checkpointer({str(tmp_path / "run")!r}, CheckpointerConfig())
checkpointer.save(1, Kind.PERMANENT, {{"params": {{"w": jnp.zeros(10)}}}}, {{}})
checkpointer.finish()
rename = os.rename
def die(source, target, **_):
    os.kill(os.getpid(), signal.SIGKILL)  # all is written, and not yet given its name
os.rename = os.replace = die
import pathlib
pathlib.Path.rename = pathlib.Path.replace = die
checkpointer.save(2, Kind.PERMANENT, {{"params": {{"w": jnp.ones(10)}}}}, {{}})
checkpointer.finish()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps(tmp_path) == [1]
    assert len(os.listdir(tmp_path / "run")) == 2
    make()
    assert os.listdir(tmp_path / "run") == ["step-1"]
