"""A stack equals a loop over layers, in order, each with its own parameters and index."""

import itertools
from typing import get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.base_config import RematPolicy
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.remat import BLOCK_INPUT, SAVED_ATTENTION
from lmtrain.models.layers.stack import stack

W = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


class Block(nn.Module):
    def setup(self):
        dims = (("embed", 4),)
        self.linear = Linear(dims, dims, nn.initializers.normal(1.0), use_bias=False)

    def __call__(self, x, layer, deterministic, segments):
        return jnp.tanh(self.linear(x)) * (layer + 1), None

    def extend(self, state, layer, start):
        x, cache = state
        return (self.linear(x) + cache[layer] * start + layer, cache.at[layer].add(1)), None


class Stack(nn.Module):
    scan: bool
    remat: bool

    def setup(self):
        self.blocks = stack(Block, 3, self.scan, self.remat)()

    def __call__(self, x):
        return self.blocks(x, jnp.arange(3), True, None)[0]

    def extend(self, x, cache, start):
        return self.blocks.extend((x, cache), jnp.arange(3), start)[0]


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


class Everything(nn.Module):
    """A block with everything that policies distinguish: products with and without weights, named values, dropout."""

    def setup(self):
        dims = (("embed", 4),)
        self.linear = Linear(dims, dims, nn.initializers.normal(1.0))
        self.drop = nn.Dropout(0.4)

    def __call__(self, x, layer, deterministic, segments):
        x = checkpoint_name(x, BLOCK_INPUT)
        scores = jnp.einsum("BSD,BTD->BST", x, x)
        mixed = checkpoint_name(jax.nn.softmax(scores) @ self.linear(x), SAVED_ATTENTION)
        return x + self.drop(jnp.tanh(mixed), deterministic=deterministic) * (layer + 1), None

    def extend(self, state, layer, start):
        return state, None


class StackOfEverything(nn.Module):
    scan: bool
    policy: bool | str

    @nn.compact
    def __call__(self, x, deterministic):
        blocks = stack(Everything, 3, self.scan, self.policy)(name="blocks")
        return blocks(x, jnp.arange(3), deterministic, None)[0]


@pytest.mark.long
def test_policies_and_unrolling_change_neither_outputs_nor_gradients_nor_dropout():
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    rng = np.random.default_rng(2)
    params = {"blocks": {"linear": {"kernel": W, "bias": rng.normal(size=(3, 4)).astype(np.float32)}}}
    weights = rng.normal(size=x.shape).astype(np.float32)

    def program(scan, policy):
        def loss(params, x, key):
            out = StackOfEverything(scan, policy).apply({"params": params}, x, False, rngs={"dropout": key})
            return (out * weights).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    plain = program(False, False)
    expected, other = (plain(params, x, jax.random.key(seed)) for seed in (5, 6))
    assert not np.array_equal(expected[1], other[1])
    for scan, policy in itertools.product([True, False], [False, *get_args(RematPolicy)]):
        found = program(scan, policy)(params, x, jax.random.key(5))
        for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6, err_msg=f"{scan=} {policy=}")
