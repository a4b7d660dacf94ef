"""A stack equals a loop over layers, in order, each with its own parameters and index."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.stack import stack

W = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


class Block(nn.Module):
    def setup(self):
        dims = (("embed", 4),)
        self.linear = Linear(dims, dims, nn.initializers.normal(1.0), use_bias=False)

    def __call__(self, x, layer, deterministic, segments):
        return jnp.tanh(self.linear(x)) * (layer + 1), None

    def extend(self, state, layer, start, count):
        x, cache = state
        return (self.linear(x) + cache[layer] * start + layer, cache.at[layer].add(1)), None


class Stack(nn.Module):
    scan: bool
    remat: bool

    def setup(self):
        self.blocks = stack(Block, [()], 3, self.scan, self.remat)

    def __call__(self, x):
        return self.blocks(x, jnp.arange(3), True, None)[0]

    def extend(self, x, cache, start):
        return self.blocks.extend((x, cache), jnp.arange(3), start, None)[0]


VARIABLES = {"params": {"blocks": {"linear": {"kernel": W}}}}
WAYS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_call_is_a_loop_over_layers(scan, remat):
    expected = X
    for layer in range(3):
        expected = np.tanh(expected @ W[layer]) * (layer + 1)
    np.testing.assert_allclose(jax.jit(Stack(scan, remat).apply)(VARIABLES, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_the_program_is_a_loop_or_has_none(scan, remat):
    text = jax.jit(Stack(scan, remat).apply).lower(VARIABLES, X).as_text()
    assert ("stablehlo.while" in text) == scan


@pytest.mark.parametrize(("scan", "remat"), WAYS)
def test_extend_gives_each_layer_its_part_of_the_cache(scan, remat):
    cache = np.array([10.0, 20.0, 30.0], np.float32)
    expected = X
    for layer in range(3):
        expected = expected @ W[layer] + cache[layer] * 2 + layer
    run = jax.jit(lambda variables: Stack(scan, remat).apply(variables, X, cache, 2.0, method="extend"))
    out, after = run(VARIABLES)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(after, cache + 1)


def test_layout_and_initial_values_do_not_depend_on_how_the_stack_runs():
    inits = [jax.jit(Stack(*way).init)(jax.random.key(0), X) for way in WAYS]
    names = nn.get_partition_spec(inits[0])["params"]["blocks"]["linear"]["kernel"]
    assert tuple(names) == ("layers", "embed", "embed")
    kernels = [nn.meta.unbox(init)["params"]["blocks"]["linear"]["kernel"] for init in inits]
    assert kernels[0].shape == (3, 4, 4)
    assert not np.array_equal(kernels[0][0], kernels[0][1])
    for kernel in kernels[1:]:
        np.testing.assert_array_equal(kernel, kernels[0])
