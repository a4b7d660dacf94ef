"""Lookup of rows of a table; its gradient is summed in float32. On meshes: tests/sharding/test_matrix.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.linear import Embed, look_up

V, D = 50, 8
RNG = np.random.default_rng(0)


def relative(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


@pytest.fixture
def frequent():
    """Ids as in text, with a few very frequent ones; and gradients of positions with a common direction."""
    shares = 1 / np.arange(1, V + 1)
    ids = RNG.choice(V, (16, 1024), p=shares / shares.sum())
    return ids, jnp.asarray(RNG.normal(0.3, 1, (16, 1024, D)), jnp.bfloat16)


def test_rows_are_those_of_the_ids_and_unknown_ids_have_none():
    table = RNG.normal(size=(V, D)).astype(np.float32)
    ids = np.array([[3, 3, 49], [0, 7, V]])
    found = np.asarray(look_up(table, ids, "vocab"))
    np.testing.assert_array_equal(found[0], table[[3, 3, 49]])
    assert np.isnan(found[1, 2]).all()


def test_a_bfloat16_table_gets_a_gradient_that_was_summed_in_float32(frequent):
    ids, upstream = frequent
    table = jnp.asarray(RNG.normal(size=(V, D)), jnp.bfloat16)
    exact = np.zeros((V, D))
    np.add.at(exact, ids, np.asarray(upstream, np.float64))

    def pull_back(find):
        return jax.jit(lambda table: jax.vjp(find, table)[1](upstream)[0])(table)

    found = pull_back(lambda table: look_up(table, ids, "vocab"))
    assert found.dtype == jnp.bfloat16
    assert relative(found, exact) < 0.003
    # the plain sum in bfloat16 is not exact
    assert relative(pull_back(lambda table: jnp.take(table, ids, axis=0)), exact) > 0.03


def test_positions_are_added_and_get_a_gradient_that_was_summed_in_float32():
    upstream = jnp.asarray(RNG.normal(0.3, 1, (2000, 4, D)), jnp.bfloat16)
    table = jnp.asarray(RNG.normal(size=(6, D)), jnp.bfloat16)
    x = jnp.zeros(upstream.shape, jnp.bfloat16)
    positions = Embed(("position", 6), D, nn.initializers.zeros)

    def add(x, table):
        return positions.apply({"params": {"embedding": table}}, x, method="add_to")

    added, pull_back = jax.vjp(add, x, table)
    np.testing.assert_array_equal(added[7], table[:4])
    d_x, d_table = pull_back(upstream)
    np.testing.assert_array_equal(d_x, upstream)
    assert relative(d_table[:4], np.asarray(upstream, np.float64).sum(0)) < 0.003
    assert not d_table[4:].any()
