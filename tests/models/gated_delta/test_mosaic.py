"""The kernels for TPUs, interpreted: a layer computes with them what it computes by XLA's operations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

import lmtrain.models.gated_delta.layer
from lmtrain.models.gated_delta.devices import choose_delta
from lmtrain.models.gated_delta.layer import GatedDelta
from lmtrain.models.gated_delta.mosaic_parts import inverses_of
from lmtrain.models.interface import Documents
from lmtrain.models.llama.config import LlamaConfig

LENGTH = 300  # two whole chunks and a part
RNG = np.random.default_rng(0)
# Documents within chunks, over several, of one token, that begin with a chunk or end with one.
STARTS = ([0, 5, 6, 7, 100, 128, 131, 200, 255], [0, 256], [0])
SEGMENTS = jnp.asarray([np.searchsorted(starts, np.arange(LENGTH), "right") for starts in STARTS])


def layer_of(**sizes):
    config = LlamaConfig(hidden_dim=16, num_heads=2, num_layers=2, seq_len=LENGTH, layer_pattern=["linear", "full"],
                         linear_attention=sizes)  # fmt: skip
    return GatedDelta(config.of_kind(config.pattern[0]))


SIZES = {
    "two value heads": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
    "one, with signs": {
        "num_key_heads": 3, "num_value_heads": 3, "key_head_dim": 6, "value_head_dim": 12, "conv_kernel_dim": 3,
        "negative_eigenvalues": True, "norm_epsilon": 1e-3,
    },
    "many": {"num_key_heads": 8, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8, "conv_kernel_dim": 2},
}  # fmt: skip


def outputs_and_gradients(monkeypatch, kernel, layer, params, x, documents):
    monkeypatch.setattr(lmtrain.models.gated_delta.layer, "has_kernel", lambda: kernel)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)

    def loss(params, x):
        y = layer.apply({"params": params}, x, 0, True, documents)
        return (y.astype(jnp.float32) * weights).sum(), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


def setup(sizes, dtype=jnp.float32):
    layer, x = layer_of(**sizes), jnp.asarray(RNG.normal(size=(3, LENGTH, 16)), dtype)
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x, 0, True, Documents())
    return layer, nn.meta.unbox(quick.random_like(abstract, 0.5)), x


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_outputs_and_every_gradient_are_those_of_xla(monkeypatch, sizes):
    layer, params, x = setup(sizes)
    documents = Documents(SEGMENTS)
    (by_xla, expected), (by_kernel, found) = (
        outputs_and_gradients(monkeypatch, kernel, layer, params, x, documents) for kernel in (False, True)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for (path, true), gradient in zip(
        jax.tree_util.tree_leaves_with_path(by_xla), jax.tree.leaves(by_kernel), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.abs(true).max() > 0, name
        np.testing.assert_allclose(gradient, true, rtol=0, atol=5e-5 * np.abs(true).max(), err_msg=name)


def test_16_bit_gradients_are_as_exact_as_those_of_xla(monkeypatch):
    layer, params, x = setup(SIZES["two value heads"])
    exact, _ = outputs_and_gradients(monkeypatch, False, layer, params, x, Documents(SEGMENTS))
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, p: p.astype(jnp.bfloat16) if path[-1].key in ("kernel", "conv_q", "conv_k", "conv_v") else p,
        params,
    )
    by_xla, by_kernel = (
        outputs_and_gradients(monkeypatch, kernel, layer, rounded, x.astype(jnp.bfloat16), Documents(SEGMENTS))[0]
        for kernel in (False, True)
    )
    for (path, true), theirs, ours in zip(
        jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(by_xla), jax.tree.leaves(by_kernel), strict=True
    ):
        scale = np.sqrt(np.square(true).mean())
        xla, kernel = (np.sqrt(np.square(np.float32(g) - true).mean()) / scale for g in (theirs, ours))
        print(f"{jax.tree_util.keystr(path)}: {xla:.1e} by XLA, {kernel:.1e} by the kernel")
        assert kernel < max(1.3 * xla, 5e-3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_the_inverse_of_16_bit_products_is_about_as_exact_as_its_rounding(strength, alike):
    keys = RNG.normal(size=(128, 64))
    keys = (1 - alike) * keys + alike * keys[:1]
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    a = np.tril(strength * keys @ keys.T, -1)
    exact = np.linalg.inv(np.eye(128) + a)
    (found,) = inverses_of([jnp.float32(a)], jnp.bfloat16)
    error, rounding = (np.sqrt(np.square(x - exact).mean()) for x in (found, np.float64(jnp.bfloat16(exact))))
    assert error <= 2 * rounding


def test_the_kernel_of_a_device_is_chosen():
    assert [choose_delta(name, "").name for name in ("tpu", "cpu")] == ["mosaic", "chunks"]
