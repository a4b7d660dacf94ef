"""GPT-2: dropout, packed documents, generation with a cache, initial values of the docstring's table."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.hf.key_map import flatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.interface import Documents

SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 3, "seq_len": 8, "mlp_scale": 2}
DROPOUT = {"embed_pdrop": 0.2, "resid_pdrop": 0.3, "attn_pdrop": 0.4}
VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


def model(**changes) -> Gpt2LM:
    return Gpt2LM(Gpt2Config(**SIZES | changes), VOCAB)


@pytest.fixture(scope="module")
def params():
    return quick.random_params(model())


@pytest.mark.parametrize("name", list(DROPOUT))
def test_each_dropout_changes_training_and_not_evaluation(params, name):
    lm = model(**{name: 0.5})

    def hidden(lm, deterministic):
        rngs = {"dropout": jax.random.key(0)}
        run = jax.jit(lambda p: lm.apply({"params": p}, TOKENS, deterministic, method="hidden", rngs=rngs))
        return np.asarray(run(params))

    assert (lm.has_dropout, model().has_dropout) == (True, False)
    plain = hidden(model(), True)
    np.testing.assert_array_equal(hidden(lm, True), plain)
    assert np.abs(hidden(lm, False) - plain).max() > 0.01


def test_the_layers_draw_different_dropout(params):
    """If equal layers each add a constant, only different masks make the sum differ from a multiple of one output."""
    zero = jax.tree.map(np.zeros_like, params)
    zero["blocks"]["mlp"]["down"]["bias"] += 1.0
    lm = model(resid_pdrop=0.5, num_layers=3)
    rngs = {"dropout": jax.random.key(0)}

    def blocks(lm):
        return lm.blocks(jnp.zeros((2, 8, 16)), jnp.arange(3), False, Documents())[0]

    total = jax.jit(lambda p: lm.apply({"params": p}, method=blocks, rngs=rngs))(zero)
    assert set(np.unique(np.asarray(total))) == {0.0, 2.0, 4.0, 6.0}


def test_packed_documents_do_not_influence_each_other(params):
    """The gradient of a document with respect to another's embeddings is zero; without segments, it is not."""
    lm = model()
    apart = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])
    assert quick.reached_tokens(lm, params, apart) == [3, 4, 5, 6]
    together = [0, 1, 2, 3, 4, 5, 6]
    assert quick.reached_tokens(lm, params, None) == quick.reached_tokens(lm, params, np.zeros((2, 8), int)) == together


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 1, 4]])
@pytest.mark.parametrize("inverse", [False, True])
def test_extending_a_cache_equals_the_full_forward(params, pieces, inverse):
    lm = model(scale_attn_by_inverse_layer_idx=inverse)
    full = jax.jit(lambda p: lm.apply({"params": p}, TOKENS))(params)
    extend = jax.jit(lambda tokens, cache, start: lm.apply({"params": params}, tokens, cache, start, method="extend"))
    cache = lm.apply({"params": params}, 2, 11, method="empty_cache")  # longer than needed
    logits, start = [], 0
    for size in pieces:
        out, cache = extend(TOKENS[:, start : start + size], cache, start)
        logits.append(out)
        start += size
    np.testing.assert_allclose(np.concatenate(logits, axis=1), full, rtol=1e-4, atol=1e-4)


def test_logits_do_not_depend_on_later_tokens(params):
    changed = TOKENS.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    run = jax.jit(lambda tokens: model().apply({"params": params}, tokens))
    before, after = np.asarray(run(TOKENS)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 0.1


def test_logits_are_float32_and_the_cache_has_the_type_of_the_parameters(params):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def dtype(*arguments, **method):
        return jax.eval_shape(lambda p: model().apply({"params": p}, *arguments, **method), half)

    assert dtype(TOKENS).dtype == jnp.float32
    assert dtype(TOKENS, True, method="hidden").dtype == jnp.bfloat16
    assert dtype(1, 4, method="empty_cache").k.dtype == jnp.bfloat16


@pytest.mark.parametrize("method", ["hidden", "extend"])
def test_upcast_attention_changes_only_half_precision(params, method):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def products(values, upcast: bool) -> int:
        """Number of matrix products in float32."""
        lm = model(upcast_attn=upcast, scan_layers=False, gradient_checkpointing=False)
        more = {
            "hidden": lambda: (True,),
            "extend": lambda: (lm.apply({"params": values}, 2, 8, method="empty_cache"), 0),
        }
        text = (
            jax.jit(lambda p: lm.apply({"params": p}, TOKENS, *more[method](), method=method)).lower(values).as_text()
        )
        return len(re.findall(r"stablehlo.dot_general.*-> tensor<\S+xf32>", text))

    assert products(params, False) == products(params, True)
    assert products(half, False) == 0 < products(half, True)


def test_initial_values_follow_the_table():
    config = Gpt2Config(hidden_dim=64, num_heads=4, num_layers=8, seq_len=256, initializer_range=0.05)
    init = jax.jit(Gpt2LM(config, 512).init)
    params = flatten(jax.device_get(nn.meta.unbox(init(jax.random.key(3), TOKENS[:, :2])))["params"])
    residual = 0.05 / 4  # sqrt(2 * 8 layers)
    spread = {
        "tokens/embedding": 0.05,
        "positions/embedding": 0.05,
        "blocks/attn/qkv/kernel": 0.05,
        "blocks/mlp/up/kernel": 0.05,
        "blocks/attn/out/kernel": residual,
        "blocks/mlp/down/kernel": residual,
    }
    for name, value in params.items():
        if name in spread:
            assert np.std(value) == pytest.approx(spread[name], rel=0.03), name
            assert abs(np.mean(value)) < 0.03 * spread[name], name
        else:
            assert np.all(value == (1.0 if name.endswith("scale") else 0.0)), name
    assert len(params) == 16
    per_layer = params["blocks/attn/qkv/kernel"]
    assert not np.array_equal(per_layer[0], per_layer[1])
