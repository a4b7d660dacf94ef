"""The kernels for TPUs and GPUs, interpreted: a layer computes with them what it computes by XLA's operations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.models.attention.kernel import Choice
from lmtrain.models.gated_delta import devices
from lmtrain.models.gated_delta.config import GatedDeltaConfig
from lmtrain.models.gated_delta.inverse import inverses_of
from lmtrain.models.gated_delta.layer import GatedDelta
from lmtrain.models.interface import Documents
from lmtrain.models.llama.config import LlamaConfig

LENGTH = 300  # two whole chunks and a part
KERNELS = ("mosaic", "triton")
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


def outputs_and_gradients(monkeypatch, kernel, layer, params, x, documents, number=1):
    """Gradients of weighted sums of outputs, for this number of random weights, and the outputs."""
    monkeypatch.setattr(devices, "choose_delta", lambda *more: Choice(kernel, ""))
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(number, *x.shape)), jnp.float32)

    def loss(params, x, weights):
        y = layer.apply({"params": params}, x, 0, True, documents)
        return (y.astype(jnp.float32) * weights).sum(), y

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    gradients, outputs = zip(*(run(params, x, each) for each in weights), strict=True)
    return jax.tree.map(lambda *each: np.stack([np.float32(one) for one in each]), *gradients), outputs[0]


def setup(sizes):
    # the same values in every order of tests: the last bit of x moves gradients of decays by 2e-5 of the largest
    layer, x = layer_of(**sizes), jnp.asarray(np.random.default_rng(0).normal(size=(3, LENGTH, 16)), jnp.float32)
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x, 0, True, Documents())
    return layer, nn.meta.unbox(quick.random_like(abstract, 0.5)), x


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_outputs_and_every_gradient_are_those_of_xla(monkeypatch, sizes, kernel):
    layer, params, x = setup(sizes)
    documents = Documents(SEGMENTS)
    (by_xla, expected), (by_kernel, found) = (
        outputs_and_gradients(monkeypatch, name, layer, params, x, documents) for name in ("chunks", kernel)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for (path, true), gradient in zip(
        jax.tree_util.tree_leaves_with_path(by_xla), jax.tree.leaves(by_kernel), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.abs(true).max() > 0, name
        np.testing.assert_allclose(gradient, true, rtol=0, atol=5e-5 * np.abs(true).max(), err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_16_bit_gradients_are_as_exact_as_those_of_xla(monkeypatch, kernel):
    layer, params, x = setup(SIZES["two value heads"])
    how = Documents(SEGMENTS), 12  # errors of sums over all positions vary
    exact, _ = outputs_and_gradients(monkeypatch, "chunks", layer, params, x, *how)
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, p: p.astype(jnp.bfloat16) if path[-1].key in ("kernel", "conv_q", "conv_k", "conv_v") else p,
        params,
    )
    by_xla, by_kernel = (
        outputs_and_gradients(monkeypatch, name, layer, rounded, x.astype(jnp.bfloat16), *how)[0]
        for name in ("chunks", kernel)
    )
    for (path, true), theirs, ours in zip(
        jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(by_xla), jax.tree.leaves(by_kernel), strict=True
    ):
        scale = np.sqrt(np.square(true).mean())
        xla, own = (np.sqrt(np.square(g - true).mean()) / scale for g in (theirs, ours))
        print(f"{jax.tree_util.keystr(path)}: {xla:.1e} by XLA, {own:.1e} by the kernel")
        assert own < max(1.3 * xla, 5e-3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("has_slices", [True, False])
@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_the_inverse_of_16_bit_products_is_about_as_exact_as_its_rounding(strength, alike, has_slices):
    """The mean of several draws: with strengths of 2, single ones have three times the error of rounding."""
    run = jax.jit(lambda a: inverses_of([a], jnp.bfloat16, has_slices)[0])
    errors, roundings = [], []
    for seed in range(12):
        keys = np.random.default_rng(seed).normal(size=(128, 64))
        keys = (1 - alike) * keys + alike * keys[:1]
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        a = np.tril(strength * keys @ keys.T, -1)
        exact = np.linalg.inv(np.eye(128) + a)
        errors.append(np.float64(run(jnp.float32(a))) - exact)
        roundings.append(np.float64(jnp.bfloat16(exact)) - exact)
    error, rounding = (np.sqrt(np.square(each).mean()) for each in (errors, roundings))
    assert error <= 2 * rounding


def test_the_kernel_of_a_device_is_chosen(monkeypatch):
    def name(platform, kind, is_split=False, dtype="bfloat16", **sizes):
        return devices.choose_delta(platform, kind, is_split, dtype, GatedDeltaConfig(**sizes)).name

    assert [name("tpu", "TPU v5"), name("tpu", "TPU v5", True), name("cpu", "")] == ["mosaic", "chunks", "chunks"]
    assert [name("gpu", "NVIDIA H100 80GB HBM3", split) for split in (False, True)] == ["triton"] * 2
    assert {name("gpu", "Tesla T4"), name("gpu", "H100", dtype="float32"), name("gpu", "H100", value_head_dim=512)} == {
        "chunks"
    }
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)  # as if JAX had removed the backend
    choice = devices.choose_delta("gpu", "NVIDIA H100", False, "bfloat16", GatedDeltaConfig())
    assert (choice.name, "the Triton backend of Pallas" in choice.reason) == ("chunks", True)
