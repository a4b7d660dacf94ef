"""A stack of layers, equal or in a pattern, is a loop over blocks: values, gradients, cache, adapters, dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from models.families import BATCH, window_model

from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import RmsNorm
from lmtrain.models.layers.stack import Pattern, stack
from lmtrain.models.llama.model import LlamaBlock

W = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


class OneKind(nn.Module):
    def setup(self):
        dims = (("embed", 4),)
        self.linear = Linear(dims, dims, nn.initializers.normal(1.0), use_bias=False)

    def __call__(self, x, layer, deterministic, segments):
        return jnp.tanh(self.linear(x)) * (layer + 1), None

    def extend(self, state, layer, start, count):
        x, cache = state
        return (self.linear(x) + cache[layer] * start + layer, cache.at[layer].add(1)), None


class EqualLayers(nn.Module):
    scan: bool
    remat: bool

    def setup(self):
        self.blocks = stack(OneKind, Pattern((), ((),)), 3, self.scan, self.remat)

    def __call__(self, x):
        return self.blocks(x, jnp.arange(3), True, None)[0]

    def extend(self, x, cache, start):
        return self.blocks.extend((x, cache), jnp.arange(3), start, None)[0]


VARIABLES = {"params": {"blocks": {"linear": {"kernel": W}}}}


@pytest.mark.parametrize(("scan", "remat"), [(True, True), (False, True), (False, False)])
def test_a_stack_is_a_loop_over_layers_each_with_its_part_of_the_cache(scan, remat):
    layers, cache = EqualLayers(scan, remat), np.array([10.0, 20.0, 30.0], np.float32)
    expected = extended = X
    for layer in range(3):
        expected = np.tanh(expected @ W[layer]) * (layer + 1)
        extended = extended @ W[layer] + cache[layer] * 2 + layer
    run = jax.jit(layers.apply)
    np.testing.assert_allclose(run(VARIABLES, X), expected, rtol=1e-4, atol=1e-5)
    assert ("stablehlo.while" in run.lower(VARIABLES, X).as_text()) == scan
    out, after = jax.jit(lambda variables: layers.apply(variables, X, cache, 2.0, method="extend"))(VARIABLES)
    np.testing.assert_allclose(out, extended, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(after, cache + 1)


TOKENS, SEGMENTS = BATCH["tokens"][:3], BATCH["segments"][:3]
WEIGHTS = np.random.default_rng(2).normal(size=(*TOKENS.shape, 16)).astype(np.float32)


def loop(model, params, tokens, documents=NO_DOCUMENTS):
    """The hidden states by a Python loop over blocks, each with its own parameters."""
    x = params["tokens"]["embedding"][tokens]
    for layer in range(model.config.num_layers):
        block = LlamaBlock(model.pattern.repeated[layer % len(model.pattern.repeated)], "xla")
        own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        x, _ = block.apply({"params": own}, x, layer, True, documents)
    return RmsNorm((("embed", 16),), 1e-5).apply({"params": params["norm_final"]}, x)


def weighed(hidden):
    return jax.jit(jax.value_and_grad(lambda params: ((out := hidden(params)) * WEIGHTS).sum() + 0 * out.sum()))


@functools.cache
def expected(num_layers):
    model = window_model(num_layers)
    params = quick.random_params(model)
    return params, weighed(lambda params: loop(model, params, TOKENS, Documents(SEGMENTS)))(params)


CASES = [(7, True, "full"), (6, False, "dots")]
LONG = [(2, True, False), (7, False, "full"), (7, True, "save_attention"), (6, True, "dots_no_batch")]
LONG += [(6, False, "offload")]


@pytest.mark.parametrize(
    ("num_layers", "scan", "policy"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_losses_and_gradients_are_those_of_a_loop(num_layers, scan, policy):
    model = window_model(num_layers, scan_layers=scan, gradient_checkpointing=policy)
    params, (loss, gradients) = expected(num_layers)

    def hidden(params):
        return model.apply({"params": params}, TOKENS, False, Documents(SEGMENTS), method="hidden")

    found_loss, found = weighed(hidden)(params)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_layout_and_initial_values_do_not_depend_on_how_the_stack_runs():
    inits = [
        jax.jit(window_model(7, scan_layers=scan, gradient_checkpointing=policy).init)(jax.random.key(0), TOKENS)
        for scan, policy in ((True, False), (False, "full"))
    ]
    plain = jax.eval_shape(window_model(7).clone(parent=None).init, jax.random.key(0), TOKENS)
    kernel = inits[0]["params"]["blocks"]["attn"]["q"]["kernel"]
    assert (kernel.names, kernel.value.shape) == (("layers", "embed", "heads", "head_dim"), (7, 16, 4, 4))
    assert len(np.unique(kernel.value)) == kernel.value.size
    assert jax.tree.structure(inits[0]) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, *inits)


def test_the_loop_reads_contiguous_parts_of_the_stack():
    """Without a remainder nothing but the loop's own slices takes parts of the stacked parameters."""
    model = window_model(6)
    params = quick.random_params(model)
    text = jax.jit(lambda params: model.apply({"params": params}, TOKENS)).lower(params).as_text()
    assert "stablehlo.while" in text
    assert not [line for line in text.splitlines() if "stablehlo.slice" in line and "tensor<6x" in line]


class Block(nn.Module):
    """y = tanh(x W) + x, with another layer of its own if `more`, and dropout."""

    more: bool

    def setup(self):
        dims = (("embed", 4),)
        self.linear = Linear(dims, dims, nn.initializers.normal(1.0), use_bias=False)
        if self.more:
            self.own = Linear(dims, dims, nn.initializers.normal(1.0))
        self.drop = nn.Dropout(0.4)

    def __call__(self, x, layer, deterministic, documents):
        x = x + self.drop(jnp.tanh(self.linear(x)), deterministic=deterministic) + 0.1 * layer
        return (jnp.sin(self.own(x)) if self.more else x), None


class Stack(nn.Module):
    num_layers: int
    scan: bool = True

    def setup(self):
        self.blocks = stack(Block, Pattern((), ((False,), (True,), (True,))), self.num_layers, self.scan, "full")

    def __call__(self, x, deterministic=True):
        return self.blocks(x, jnp.arange(self.num_layers), deterministic, NO_DOCUMENTS)[0]


@pytest.mark.parametrize(("num_layers", "own"), [(6, [1, 2, 4, 5]), (8, [1, 2, 4, 5, 7])])
def test_a_parameter_is_stacked_over_the_layers_that_have_it(num_layers, own):
    model = Stack(num_layers)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), X))["params"]
    linear, more = params["blocks"]["linear"]["kernel"], params["blocks"]["own"]["kernel"]
    assert (linear.shape, more.shape) == ((num_layers, 4, 4), (len(own), 4, 4))
    rng = np.random.default_rng(3)
    lora = {
        "lora_a": rng.normal(scale=0.2, size=(len(own), 2, 4)).astype(np.float32),
        "lora_b": rng.normal(size=(len(own), 4, 2)).astype(np.float32),
    }
    found = jax.jit(model.apply)({"params": params, "lora": {"blocks": {"own": lora}}}, X)
    x = np.float64(X)
    for layer in range(num_layers):
        x = x + np.tanh(x @ linear[layer]) + 0.1 * layer
        if layer in own:
            number = own.index(layer)
            x = np.sin(x @ (more[number] + (lora["lora_b"][number] @ lora["lora_a"][number]).T))
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)


def test_dropout_differs_between_layers_and_does_not_depend_on_how_the_stack_runs():
    params = jax.jit(Stack(7).init)(jax.random.key(0), X)
    runs = [
        jax.jit(functools.partial(Stack(7, scan).apply, deterministic=False, rngs={"dropout": jax.random.key(seed)}))(
            params, X
        )
        for scan, seed in ((True, 5), (False, 5), (True, 6))
    ]
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5, atol=1e-5)
    assert np.abs(runs[0] - runs[2]).max() > 0.01
