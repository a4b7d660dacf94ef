"""Initial training state: dtypes, structure, and values that depend only on the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.step.state import init_state, state_shardings

MODEL = Gpt2LM(Gpt2Config(hidden_dim=8, num_heads=2, num_layers=2, seq_len=8), 12)
OPTIMIZER = optax.adam(0.1)


@pytest.fixture(scope="module")
def layout():
    return build_layout(PartitioningConfig())


@pytest.fixture(scope="module")
def make(layout):
    def make(seed: int = 0, dtype: str = "float32"):
        abstract, shardings = state_shardings(MODEL, OPTIMIZER, layout, dtype)
        return init_state(MODEL, OPTIMIZER, abstract, shardings, seed=seed)

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_matches_the_abstract_state(layout, make, dtype):
    abstract, shardings = state_shardings(MODEL, OPTIMIZER, layout, dtype)
    state = make(dtype=dtype)
    assert jax.tree.structure(state) == jax.tree.structure(abstract) == jax.tree.structure(shardings)
    for leaf, shape, sharding in zip(*map(jax.tree.leaves, (state, abstract, shardings)), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state[0].mu)} == {jnp.dtype(dtype)}


def test_training_starts_at_step_0_with_moments_of_zero(make):
    state = make()
    assert state.step.dtype == jnp.int32
    assert int(state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


def test_the_values_depend_on_the_seed_only(make):
    first, again, other = (jax.tree.leaves(make(seed).params) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
