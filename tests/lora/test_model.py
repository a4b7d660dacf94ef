"""A model with adapters: at the start it is its base; dropout is on inputs of A only; the cache has their logits.

`tests/parity/test_peft.py` compares adapters with merged weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from models import quick

from lmtrain.lora.model import ADAPTERS, BASE, adapt, start_from
from lmtrain.models.interface import MAIN, outputs_of
from lmtrain.models.params import initializer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig

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
    "family", ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("mpt", "backpack"))]
)
def test_new_adapters_leave_the_logits_as_those_of_the_base(family):
    model = adapted(family, alpha=16, modules_to_save=["embed_tokens", "lm_head"])
    params = new_params(model)
    ours = model.apply({"params": params}, tokens())
    theirs = model.inner.apply({"params": params[BASE]}, tokens())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_dropout_changes_training_only_and_only_through_the_adapters():
    model = adapted("llama", dropout=0.5)
    params = new_params(model)
    batch = {"tokens": jnp.asarray(tokens())}

    def hidden(params, deterministic):
        rngs = {"dropout": jax.random.key(0)}
        return model.apply({"params": params}, batch, deterministic, method=outputs_of, rngs=rngs)[MAIN].hidden

    assert model.has_dropout
    np.testing.assert_array_equal(hidden(params, False), hidden(params, True))  # B is zero
    noisy = jax.tree.map(lambda leaf: leaf + 0.1, params[ADAPTERS])
    params = {BASE: params[BASE], ADAPTERS: noisy}
    with_dropout = hidden(params, False)
    assert (
        np.abs(
            with_dropout - adapted("llama").apply({"params": params}, batch, True, method=outputs_of)[MAIN].hidden
        ).max()
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
