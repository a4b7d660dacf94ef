"""State restored from a checkpoint is bitwise equal; parameters can be restored alone, in their saved dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.checkpoint.policies import Kind
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.start.restore import restore_params, restore_state
from lmtrain.train.step.state import TrainState, state_shardings

MODEL = Gpt2LM(Gpt2Config(hidden_dim=8, num_heads=2, num_layers=2, seq_len=8), 12)
OPTIMIZER = optax.adam(0.1)
LAYOUT = plan_layout(PartitioningConfig())


def random_like(abstract):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(100 * rng.normal(size=leaf.shape), leaf.dtype), abstract)


@pytest.fixture(params=["float32", "bfloat16"])
def saved(request, tmp_path):
    """A random state in this precision, its abstract form and shardings, and its checkpoint."""
    abstract, shardings = state_shardings(MODEL, OPTIMIZER, LAYOUT, request.param)
    state = TrainState(jnp.int32(7), random_like(abstract.params), random_like(abstract.opt_state))
    checkpointer = Checkpointer(str(tmp_path), CheckpointerConfig())
    info = {"config": {"trainer": {"mp": f"p={request.param},c=float32"}}}
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


def test_parameters_are_restored_alone_in_their_saved_dtype(saved):
    state, _, _, checkpoint = saved
    assert_bitwise_equal(restore_params(checkpoint, MODEL, LAYOUT), state.params)
