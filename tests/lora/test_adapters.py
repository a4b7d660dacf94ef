"""Adapters as arrays: initial values, merging, and parameters that are trained in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.lora.model import adapted_layers, init_adapters, merge_layer, start_from, trained_in_full
from lmtrain.lora.sites import Site

SITES = [
    Site(path="blocks/q", module="layers.{layer}.q", inputs=16, outputs=6, layers=(0, 1, 2), is_conv1d=False),
    Site(path="weigh", module="weigh", inputs=4, outputs=8, layers=None, is_conv1d=False),
]


def test_a_is_uniform_by_the_number_of_inputs_and_b_is_zero():
    flat = init_adapters(SITES, 200, jax.random.key(0))
    assert {path: (box.value.shape, box.names) for path, box in flat.items()} == {
        "blocks/q/lora_a": ((3, 200, 16), ("layers", "lora_rank", None)),
        "blocks/q/lora_b": ((3, 6, 200), ("layers", None, "lora_rank")),
        "weigh/lora_a": ((200, 4), ("lora_rank", None)),
        "weigh/lora_b": ((8, 200), (None, "lora_rank")),
    }
    for site in SITES:
        a, bound = np.asarray(flat[f"{site.path}/lora_a"].value), site.inputs**-0.5
        assert np.abs(a).max() <= bound
        assert a.std() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not flat[f"{site.path}/lora_b"].value.any()


def test_a_merged_layer_is_the_kernel_plus_the_product_and_keeps_its_bits_where_that_is_zero():
    rng = np.random.default_rng(0)
    kernel, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 2, 4), (3, 6), (8, 3)))
    merged = merge_layer(kernel, a, b, 0.5)
    expected = kernel.reshape(6, 8) + 0.5 * (np.float64(b) @ a).T
    np.testing.assert_allclose(merged.reshape(6, 8), expected, rtol=1e-5, atol=1e-6)
    half = kernel.astype(jnp.bfloat16)
    half.flat[0] = -0.0
    assert merge_layer(half, a, np.zeros_like(b), 0.5).astype(jnp.bfloat16).tobytes() == half.tobytes()


def test_parameters_that_are_trained_in_full_start_with_the_values_of_the_base():
    adapters = {"blocks": {"q": {"lora_a": np.ones(2), "lora_b": np.ones(2)}}, "tokens": {"embedding": np.zeros(3)}}
    base = {"blocks": {"q": {"kernel": np.zeros(4)}}, "tokens": {"embedding": np.full(3, 7.0, np.float16)}}
    started = start_from(adapters, base)
    assert started["tokens"]["embedding"].tolist() == [7.0] * 3
    assert started["tokens"]["embedding"].dtype == np.float64
    assert started["blocks"] == adapters["blocks"]
    flat = ["blocks/q/lora_a", "blocks/q/lora_b", "tokens/embedding"]
    assert adapted_layers(dict.fromkeys(flat)) == ["blocks/q"]
    assert trained_in_full(dict.fromkeys(flat)) == ["tokens/embedding"]
