"""A model with adapters: at the start it is its base; merged, it computes the same; dropout is on inputs of A only."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from models import quick

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import flatten, unflatten
from lmtrain.lora.adapters import merge_layer, start_from
from lmtrain.lora.fingerprint import fingerprint
from lmtrain.lora.model import ADAPTERS, BASE, adapt
from lmtrain.models.interface import hidden_and_head
from lmtrain.models.params import abstract_params, initializer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout

VOCAB = 50
FAMILIES = ("gpt2", "llama", "mpt", "backpack")
SUITE = [("gpt2", True), ("llama", False), ("backpack", True)]


def mark_long(*cases, long):
    return [*cases, *(pytest.param(*case, marks=pytest.mark.long) for case in long)]


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


@pytest.mark.parametrize("family", mark_long("gpt2", "llama", long=[("mpt",), ("backpack",)]))
def test_new_adapters_leave_logits_and_merged_weights_as_those_of_the_base(family):
    model = adapted(family, alpha=16, modules_to_save=["embed_tokens", "lm_head"])
    params = new_params(model)
    ours = model.apply({"params": params}, tokens())
    theirs = model.inner.apply({"params": params[BASE]}, tokens())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    base, adapters = flatten(params[BASE]), flatten(params[ADAPTERS])
    for site in model.sites:
        kernel = np.asarray(base[f"{site.path}/kernel"]).astype(jnp.bfloat16)
        kernel.flat[0] = -0.0
        layer = 0 if site.layers is not None else slice(None)
        a, b = (np.asarray(adapters[f"{site.path}/{name}"])[layer] for name in ("lora_a", "lora_b"))
        merged = merge_layer(kernel[layer], a, b, model.scale).astype(jnp.bfloat16)
        assert merged.tobytes() == kernel[layer].tobytes()


@pytest.mark.parametrize(
    ("family", "scan"),
    mark_long(*SUITE, long=[case for case in itertools.product(FAMILIES, (True, False)) if case not in SUITE]),
)
def test_merged_weights_give_the_logits_of_the_adapters(family, scan):
    model = adapted(family, {"scan_layers": scan, "gradient_checkpointing": scan}, alpha=12)
    rng = np.random.default_rng(1)
    shapes = meta.unbox(abstract_params(model)[ADAPTERS])
    adapters = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    base = quick.random_params(model.inner, scale=0.1)
    low, merged = flatten(adapters), dict(flatten(base))
    for site in model.sites:
        path, a, b = f"{site.path}/kernel", low[f"{site.path}/lora_a"], low[f"{site.path}/lora_b"]
        if site.layers is None:
            merged[path] = merge_layer(merged[path], a, b, model.scale)
        else:
            merged[path] = np.stack(
                [merge_layer(*layer, model.scale) for layer in zip(merged[path], a, b, strict=True)]
            )
    ours = model.apply({"params": {BASE: base, ADAPTERS: adapters}}, tokens())
    theirs = model.inner.apply({"params": unflatten(merged)}, tokens())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    assert np.abs(ours - model.inner.apply({"params": base}, tokens())).max() > 1e-3


def test_dropout_changes_training_only_and_only_through_the_adapters():
    model = adapted("llama", dropout=0.5)
    params = new_params(model)
    batch = {"tokens": jnp.asarray(tokens())}

    def hidden(params, deterministic):
        rngs = {"dropout": jax.random.key(0)}
        return model.apply({"params": params}, batch, deterministic, method=hidden_and_head, rngs=rngs)[0]

    assert model.has_dropout
    np.testing.assert_array_equal(hidden(params, False), hidden(params, True))  # B is zero
    noisy = jax.tree.map(lambda leaf: leaf + 0.1, params[ADAPTERS])
    params = {BASE: params[BASE], ADAPTERS: noisy}
    with_dropout = hidden(params, False)
    assert (
        np.abs(with_dropout - adapted("llama").apply({"params": params}, batch, True, method=hidden_and_head)[0]).max()
        > 0.01
    )
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


def modules_of(model):
    return sorted({site.module.rpartition(".")[2] for site in model.sites})


def test_the_layers_are_chosen_by_the_names_of_hugging_face():
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert modules_of(adapted("llama")) == modules_of(adapted("llama", target_modules="all-linear")) == every
    assert modules_of(adapted("llama", target_modules=["q_proj", "mlp.up_proj"])) == ["q_proj", "up_proj"]
    assert modules_of(adapted("llama", target_modules=r".*self_attn\.[qv]_proj")) == ["q_proj", "v_proj"]
    assert [site.path for site in adapted("gpt2", target_modules=["attn.c_proj"]).sites] == ["blocks/attn/out"]
    assert modules_of(adapted("mpt")) == ["Wqkv", "down_proj", "out_proj", "up_proj"]
    assert modules_of(adapted("backpack")) == ["c_attn", "c_fc", "c_proj"]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["q_prj"]}, r"target_modules: q_prj matches no linear layer; .*did you mean q_proj"),
        ({"target_modules": ["lm_head"]}, r"lm_head matches no linear layer; this model has down_proj, gate_proj"),
        ({"target_modules": "q_proj"}, "q_proj matches no linear layer"),  # not the full name
        ({"target_modules": "(q"}, "invalid regular expression"),
        ({"target_modules": r".*layers\.1\..*"}, "matches some blocks only"),
        (
            {"modules_to_save": ["norm"]},
            "modules_to_save: norm matches no embedding table; this model has embed_tokens",
        ),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_those_that_exist(lora, message):
    with pytest.raises(UserError, match=message):
        adapted("llama", **lora)


@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        ("gpt2", {}, ("tokens/embedding",)),
        ("llama", {"tie_word_embeddings": True}, ("tokens/embedding",)),
        ("llama", {}, ("unembed/embedding",)),
    ],
)
def test_a_tied_head_is_the_table_of_the_embeddings(family, model, expected):
    assert adapted(family, model, modules_to_save=["lm_head"]).in_full == expected


def test_the_scale_is_alpha_over_r_or_over_its_root():
    assert adapted(alpha=8).scale == 2.0
    assert adapted(alpha=8, use_rslora=True).scale == 4.0


def test_the_fingerprint_depends_on_every_value_and_on_the_dtype():
    layout = plan_layout(PartitioningConfig())
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
