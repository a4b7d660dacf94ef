"""Adapters as arrays and in a model: initial values, merging, dropout, cache. With PEFT: tests/parity/test_peft.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from models import quick

from lmtrain.lora.model import (
    ADAPTERS,
    BASE,
    adapt,
    fingerprint,
    init_adapters,
    merge_layer,
    start_from,
    trained_in_full,
)
from lmtrain.lora.sites import Site
from lmtrain.models.interface import MAIN, outputs_of
from lmtrain.models.params import initializer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

VOCAB = 50


def adapted(family="gpt2", model=(), **lora):
    sizes = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": 16, "gradient_checkpointing": False}
    settings = {"model": {"type": family, **sizes, **dict(model)}, "lora": {"r": 4, **lora}, "initialize_from_hf": "x"}
    config = RunConfig.model_validate(settings)
    return adapt(config.lora, config.model, build_model(config.model, VOCAB))


def tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (2, 16))


def new_params(model, seed=1):
    """Random base, new adapters."""
    adapters = meta.unbox(initializer(model)(jax.random.key(seed)))[ADAPTERS]
    base = quick.random_params(model.inner)
    return {BASE: base, ADAPTERS: start_from(adapters, base)}


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "mpt", "backpack"))]
)
def test_new_adapters_leave_the_logits_as_those_of_the_base(family):
    model = adapted(family, alpha=16, modules_to_save=["embed_tokens", "lm_head"])
    params = new_params(model)
    ours = jax.jit(model.apply)({"params": params}, tokens())
    theirs = jax.jit(model.inner.apply)({"params": params[BASE]}, tokens())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_dropout_changes_training_only_and_only_through_the_adapters():
    model = adapted("llama", dropout=0.5)
    params = new_params(model)
    batch = {"tokens": jnp.asarray(tokens())}

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(params, deterministic):
        rngs = None if deterministic else {"dropout": jax.random.key(0)}
        return model.apply({"params": params}, batch, deterministic, method=outputs_of, rngs=rngs)[MAIN].hidden

    assert model.has_dropout
    np.testing.assert_array_equal(hidden(params, False), hidden(params, True))  # B is zero
    noisy = jax.tree.map(lambda leaf: leaf + 0.1, params[ADAPTERS])
    params = {BASE: params[BASE], ADAPTERS: noisy}
    with_dropout = hidden(params, False)
    assert np.abs(with_dropout - hidden(params, True)).max() > 0.01
    np.testing.assert_array_equal(with_dropout, hidden(params, False))


def test_the_cache_of_keys_and_values_gives_the_logits_of_the_adapters():
    model = adapted("llama", alpha=16)
    params = new_params(model)
    params[ADAPTERS] = jax.tree.map(lambda leaf: leaf + 0.05, params[ADAPTERS])
    whole = jax.jit(model.apply)({"params": params}, tokens())
    cache = model.apply({"params": params}, 2, 16, method="empty_cache")
    extend = jax.jit(functools.partial(model.apply, method="extend"))
    first, cache = extend({"params": params}, tokens()[:, :8], cache, jnp.int32(0))
    second, _ = extend({"params": params}, tokens()[:, 8:], cache, jnp.int32(8))
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=0, atol=1e-4)


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
    assert trained_in_full(dict.fromkeys(flat)) == ["tokens/embedding"]


def test_the_fingerprint_depends_on_every_value_and_on_the_dtype():
    layout = build_layout(PartitioningConfig())
    params = {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.zeros((4,), jnp.bfloat16)}
    same = fingerprint(jax.tree.map(jnp.copy, params), layout)
    assert fingerprint(params, layout) == same
    others = [
        {**params, "b": jnp.zeros((4,), jnp.bfloat16).at[3].set(1e-30)},
        {**params, "b": jnp.zeros((4,), jnp.float16)},
        {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)[::-1]}, "b": params["b"]},
        {"a": {"other": params["a"]["kernel"]}, "b": params["b"]},
    ]
    assert len({same, *(fingerprint(other, layout) for other in others)}) == 5
