"""A stack of blocks is a plain Python loop over the layers' own parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.stack import stack

LAYERS = 3
X = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
WAYS = [(True, True), (True, False), (False, True), (False, False)]


class Block(nn.Module):
    """x -> tanh(x W + b) * (layer + 1), with dropout; extending also moves its own cache by one."""

    def setup(self):
        self.linear = Linear((("embed", 5),), (("mlp", 5),), nn.initializers.normal(1.0))
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, layer, deterministic):
        return self.drop(jnp.tanh(self.linear(x)) * (layer + 1), deterministic=deterministic), None

    def extend(self, x, layer, cache, start):
        return jnp.tanh(self.linear(x)) * (layer + 1) + cache + start, cache + 1


def build(scan=True, remat=False):
    return stack(Block, LAYERS, scan, remat)()


@pytest.fixture(scope="module")
def boxed():
    return build().init(jax.random.key(0), X, jnp.arange(LAYERS), True)["params"]


def by_hand(params, cache=None, start=0.0):
    x = X
    for layer in range(LAYERS):
        kernel, bias = params["linear"]["kernel"][layer], params["linear"]["bias"][layer]
        x = np.tanh(x @ kernel + bias) * (layer + 1) + (0 if cache is None else cache[layer]) + start
    return x


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_the_stack_is_a_loop_over_layers(boxed, scan, remat):
    params = nn.meta.unbox(boxed)
    y, nothing = build(scan, remat).apply({"params": params}, X, jnp.arange(LAYERS), True)
    assert nothing is None
    np.testing.assert_allclose(y, by_hand(params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_extend_gives_each_layer_its_own_cache(boxed, scan, remat):
    params = nn.meta.unbox(boxed)
    cache = jnp.array([0.5, 1.5, -1.0])
    y, moved = build(scan, remat).apply({"params": params}, X, jnp.arange(LAYERS), cache, 0.25, method="extend")
    np.testing.assert_allclose(y, by_hand(params, cache, 0.25), rtol=1e-5, atol=1e-5)
    assert np.array_equal(moved, [1.5, 2.5, 0.0])


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_initial_values_and_names_do_not_depend_on_how_the_stack_runs(boxed, scan, remat):
    other = build(scan, remat).init(jax.random.key(0), X, jnp.arange(LAYERS), True)["params"]
    assert jax.tree.structure(other) == jax.tree.structure(boxed)
    assert jax.tree.all(jax.tree.map(np.array_equal, nn.meta.unbox(other), nn.meta.unbox(boxed)))
    assert other["linear"]["kernel"].names == ("layers", "embed", "mlp")
    assert other["linear"]["bias"].names == ("layers", "mlp")


def test_layers_start_with_different_values(boxed):
    kernel = np.asarray(nn.meta.unbox(boxed)["linear"]["kernel"])
    assert kernel.shape == (LAYERS, 5, 5)
    assert len({layer.tobytes() for layer in kernel}) == LAYERS


@pytest.mark.parametrize(("scan", "remat"), WAYS[1:])
def test_dropout_is_the_same_however_the_stack_runs(boxed, scan, remat):
    params = nn.meta.unbox(boxed)

    def run(way):
        arguments = {"params": params}, X, jnp.arange(LAYERS), False
        return build(*way).apply(*arguments, rngs={"dropout": jax.random.key(7)})[0]

    expected = run(WAYS[0])
    assert (np.asarray(expected) == 0).any()
    np.testing.assert_allclose(run((scan, remat)), expected, rtol=1e-5, atol=1e-5)


def test_layers_drop_different_places():
    x = jnp.ones((1, 1000))

    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x, layer, deterministic):
            return nn.Dropout(0.5)(x, deterministic=deterministic), None

        def extend(self, x, layer, cache, start):
            return x, cache

    y, _ = stack(Drop, 2, True, False)().apply({}, x, jnp.arange(2), False, rngs={"dropout": jax.random.key(0)})
    # two independent halves leave a quarter; the same half twice would leave a half
    assert 0.2 < float((y != 0).mean()) < 0.3
