"""What all families share: dropout, packed documents, the cache, the head, precision, initial values."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from pydantic import TypeAdapter

from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import NO_DOCUMENTS
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model

VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))
SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 2, "seq_len": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"mlp_scale": 2},
    "llama": {"intermediate_dim": 24, "num_kv_heads": 1},
    "mpt": {"mlp_scale": 2, "use_bias": True},
    "backpack": {"mlp_scale": 2, "num_senses": 4},
}
of_every_family = pytest.mark.parametrize("family", FAMILIES)


def model(family: str, vocab: int = VOCAB, **changes: Any):
    settings = {"type": family, **SIZES, **FAMILIES[family], **changes}
    return build_model(TypeAdapter(ModelConfig).validate_python(settings), vocab)


@functools.cache
def params_of(family: str) -> Any:
    return quick.random_params(model(family))


@pytest.mark.parametrize("name", ["embed_pdrop", "resid_pdrop", "attn_pdrop"])
@pytest.mark.parametrize("family", ["gpt2", "mpt", "backpack"])
def test_each_dropout_changes_training_and_not_evaluation(family, name):
    dropping = model(family, **{name: 0.5})
    assert quick.changed_by_dropout(dropping, model(family), params_of(family), TOKENS) > 0.01


def test_the_layers_draw_different_dropout():
    """If equal layers each add a constant, only different masks make the sum differ from a multiple of one output."""
    zero = jax.tree.map(np.zeros_like, quick.random_params(model("gpt2", num_layers=3)))
    zero["blocks"]["mlp"]["down"]["bias"] += 1.0
    lm = model("gpt2", resid_pdrop=0.5, num_layers=3)
    rngs = {"dropout": jax.random.key(0)}

    def blocks(lm):
        return lm.blocks(jnp.zeros((2, 8, 16)), jnp.arange(3), False, NO_DOCUMENTS)[0]

    total = jax.jit(lambda p: lm.apply({"params": p}, method=blocks, rngs=rngs))(zero)
    assert set(np.unique(np.asarray(total))) == {0.0, 2.0, 4.0, 6.0}


@of_every_family
def test_packed_documents_do_not_influence_each_other(family):
    """The gradient of a document with respect to another's embeddings is zero; without segments, it is not."""
    lm, params = model(family), params_of(family)
    apart = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])
    assert quick.reached_tokens(lm, params, apart) == [3, 4, 5, 6]
    together = [0, 1, 2, 3, 4, 5, 6]
    assert quick.reached_tokens(lm, params, None) == quick.reached_tokens(lm, params, np.zeros((2, 8), int)) == together


@of_every_family
def test_half_precision_stays_half_but_for_the_logits(family):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of(family))

    def shapes(*arguments, **method):
        return jax.eval_shape(lambda p: model(family).apply({"params": p}, *arguments, **method), half)

    assert shapes(TOKENS).dtype == jnp.float32
    assert shapes(TOKENS, True, method="hidden").dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(1, 4, method="empty_cache"))} == {jnp.bfloat16.dtype}


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_or_untied(tied):
    lm, params = model("mpt", tie_word_embeddings=tied), params_of("mpt")
    table = np.random.default_rng(2).normal(size=(128, 16)).astype(np.float32)
    values = params if tied else params | {"unembed": {"embedding": table}}
    hidden = jax.jit(lambda p: lm.apply({"params": p}, TOKENS, True, method="hidden"))(values)
    logits = jax.jit(lambda p: lm.apply({"params": p}, TOKENS))(values)
    rows = params["tokens"]["embedding"] if tied else table
    np.testing.assert_allclose(logits, hidden @ rows[:VOCAB].T, rtol=1e-4, atol=1e-4)


RESIDUAL = 0.05 / 4  # of sqrt(2 * 8 layers)
TABLES = {"tokens/embedding": 0.05, "positions/embedding": 0.05}
GPT2 = {"blocks/attn/qkv/kernel": 0.05, "blocks/mlp/up/kernel": 0.05}
GPT2 |= {"blocks/attn/out/kernel": RESIDUAL, "blocks/mlp/down/kernel": RESIDUAL}
SENSES = {f"senses/{name}/kernel": 0.05 for name in ("mlp/up", "to_senses/up", "to_senses/down")}
LLAMA = {f"blocks/{name}/kernel": 0.05 for name in ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/gate", "mlp/up")}
KAIMING = (2 / 64) ** 0.5
MPT = {"blocks/attn/qkv/kernel": KAIMING, "blocks/mlp/up/kernel": KAIMING, "blocks/attn/out/kernel": KAIMING / 4}
UNTIED = ("tokens/embedding", "unembed/embedding")


@pytest.mark.parametrize(
    ("family", "changes", "spread"),
    [
        ("gpt2", {}, TABLES | GPT2),
        ("llama", {"use_bias": True}, LLAMA | {"blocks/mlp/down/kernel": 0.05} | dict.fromkeys(UNTIED, 0.05)),
        (
            "mpt",
            {"initializer_range": 0.02, "mlp_scale": 3, "tie_word_embeddings": False},
            MPT | {"blocks/mlp/down/kernel": (2 / 192) ** 0.5 / 4} | dict.fromkeys(UNTIED, KAIMING),
        ),
        ("mpt", {"init_scheme": "normal"}, GPT2 | {"tokens/embedding": 0.05}),
        ("backpack", {}, TABLES | GPT2 | SENSES | {"senses/mlp/down/kernel": 0.05 / 2**0.5, "weigh/kernel": 0.05}),
    ],
)
def test_initial_values_follow_the_docstring(family, changes, spread):
    sizes = {"hidden_dim": 64, "num_heads": 4, "num_layers": 8, "seq_len": 256, "initializer_range": 0.05}
    lm = model(family, 512, **sizes | changes)
    params = flatten(jax.device_get(nn.meta.unbox(jax.jit(lm.init)(jax.random.key(3), TOKENS[:, :2])))["params"])
    assert spread.keys() <= params.keys()
    for name, value in params.items():
        if name in spread:
            assert np.std(value) == pytest.approx(spread[name], rel=0.03), name
            assert abs(np.mean(value)) < 0.05 * spread[name], name
        else:
            assert np.all(value == (1.0 if name.endswith("scale") else 0.0)), name
    kernels = params["blocks/attn/out/kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
