"""State restored from a checkpoint is bitwise equal, and has the shardings of the run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.start.initial_state import restore_state
from lmtrain.train.step.state import TrainState, state_shardings

MODEL = Gpt2LM(Gpt2Config(hidden_dim=8, num_heads=2, num_layers=2, seq_len=8), 12)
OPTIMIZER = optax.adam(0.1)
LAYOUT = build_layout(PartitioningConfig())


def random_like(abstract):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(100 * rng.normal(size=leaf.shape), leaf.dtype), abstract)


@pytest.fixture
def saved(tmp_path):
    """A random state, its abstract form and shardings, and its checkpoint."""
    abstract, shardings = state_shardings(MODEL, OPTIMIZER, LAYOUT, "bfloat16")
    state = TrainState(jnp.int32(7), random_like(abstract.params), random_like(abstract.opt_state))
    checkpointer = Checkpointer(str(tmp_path), CheckpointerConfig())
    info = {"config": {"trainer": {"mp": "p=bfloat16,c=float32"}}}
    checkpointer.save(7, Kind.PERMANENT, state.parts, info)
    checkpointer.close()
    return state, abstract, shardings, find_checkpoints(str(tmp_path))[-1]


def assert_bitwise_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_complete_state_is_restored_with_its_shardings(saved):
    state, abstract, shardings, checkpoint = saved
    loaded = restore_state(checkpoint, abstract, shardings)
    assert_bitwise_equal(loaded, state)
    for leaf, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding


def test_an_average_and_moments_of_an_older_checkpoint_in_bfloat16_are_converted_and_logged(tmp_path, caplog):
    """They had the dtype of the parameters."""
    abstract, shardings = state_shardings(MODEL, OPTIMIZER, LAYOUT, "bfloat16", averages=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract.ema_params)} == {jnp.dtype("float32")}
    params, average = (random_like(abstract.params) for _ in range(2))
    state = TrainState(jnp.int32(7), params, random_like(abstract.opt_state), average)
    checkpointer = Checkpointer(str(tmp_path), CheckpointerConfig())
    checkpointer.save(7, Kind.PERMANENT, state.parts, {})
    checkpointer.close()
    with caplog.at_level("INFO"):
        loaded = restore_state(find_checkpoints(str(tmp_path))[-1], abstract, shardings)
    assert any("converted to float32: average (bfloat16)" in message for message in caplog.messages)
    assert_bitwise_equal(loaded.params, params)
    assert_bitwise_equal(loaded.ema_params, jax.tree.map(lambda x: x.astype(jnp.float32), average))
