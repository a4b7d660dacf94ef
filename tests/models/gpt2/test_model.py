"""GPT-2: the ways to run it agree, the cache changes nothing, initial values follow the table in the docstring."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.hf.key_map import flatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 3, "seq_len": 8, "mlp_scale": 2}
DROPOUT = {"embed_pdrop": 0.2, "resid_pdrop": 0.3, "attn_pdrop": 0.4}
VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    """Tiny programs run for microseconds; what takes time is optimizing them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def model(**changes) -> Gpt2LM:
    return Gpt2LM(Gpt2Config(**SIZES | changes), VOCAB)


@pytest.fixture(scope="module")
def params():
    """Every parameter random, large enough that each matters."""
    shapes = nn.meta.unbox(jax.eval_shape(model().init, jax.random.key(0), TOKENS))["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.4).astype(np.float32), shapes)


def run(lm: Gpt2LM, params, deterministic: bool):
    """Hidden states and gradients of a sum that weighs each of them differently."""
    weights = np.random.default_rng(2).normal(size=(2, 8, 16)).astype(np.float32)

    def loss(p):
        rngs = {} if deterministic else {"dropout": jax.random.key(5)}
        hidden = lm.apply({"params": p}, TOKENS, deterministic, method="hidden", rngs=rngs)
        return (hidden * weights).sum(), hidden

    gradients, hidden = jax.jit(jax.grad(loss, has_aux=True))(params)
    return hidden, gradients


@pytest.mark.parametrize("deterministic", [True, False])
def test_scan_unrolled_and_remat_give_the_same_outputs_and_gradients(params, deterministic):
    ways = itertools.product([True, False], repeat=2)
    results = [
        run(model(scan_layers=scan, gradient_checkpointing=remat, **DROPOUT), params, deterministic)
        for scan, remat in ways
    ]
    for hidden, gradients in results[1:]:
        np.testing.assert_allclose(hidden, results[0][0], rtol=1e-4, atol=1e-5)
        for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(results[0][1]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(DROPOUT))
def test_each_dropout_changes_training_and_not_evaluation(params, name):
    lm = model(**{name: 0.5})

    def hidden(lm, deterministic):
        rngs = {"dropout": jax.random.key(0)}
        return np.asarray(lm.apply({"params": params}, TOKENS, deterministic, method="hidden", rngs=rngs))

    assert (lm.has_dropout, model().has_dropout) == (True, False)
    plain = hidden(model(), True)
    np.testing.assert_array_equal(hidden(lm, True), plain)
    assert np.abs(hidden(lm, False) - plain).max() > 0.01


def test_the_layers_draw_different_dropout(params):
    """With equal layers that add a constant each, only different masks make the sum differ from a multiple of one."""
    zero = jax.tree.map(np.zeros_like, params)
    zero["blocks"]["mlp"]["down"]["bias"] += 1.0
    lm = model(resid_pdrop=0.5, num_layers=3)
    rngs = {"dropout": jax.random.key(0)}
    x = jnp.zeros((2, 8, 16))
    bound = lm.bind({"params": zero}, rngs=rngs)
    total, _ = bound.blocks(x, jnp.arange(3), False, None)
    assert set(np.unique(np.asarray(total))) == {0.0, 2.0, 4.0, 6.0}


@pytest.mark.parametrize("remat", [False, True])
def test_documents_in_one_sequence_know_nothing_of_one_another(params, remat):
    """With segments, a document's gradient by another's embeddings is zero; without, it is not."""
    lm = model(gradient_checkpointing=remat)
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])

    def gradient(segments):
        def second(params):
            hidden = lm.apply({"params": params}, np.arange(16).reshape(2, 8), True, segments, method="hidden")
            return (hidden[0, 3:7] ** 3).sum()  # of the first row's document 1, tokens 3 to 6

        return np.abs(np.asarray(jax.grad(second)(params)["tokens"]["embedding"])).sum(axis=1)

    assert np.flatnonzero(gradient(segments)).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(gradient(None)).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 1, 4]])
@pytest.mark.parametrize("inverse", [False, True])
def test_extending_a_cache_equals_the_full_forward(params, pieces, inverse):
    lm = model(scale_attn_by_inverse_layer_idx=inverse)
    full = lm.apply({"params": params}, TOKENS)
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
    lm = model()
    before, after = (lm.apply({"params": params}, tokens) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 0.1


def test_logits_are_float32_and_the_cache_has_the_type_of_the_parameters(params):
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    lm = model()
    assert lm.apply({"params": half}, TOKENS).dtype == jnp.float32
    assert lm.apply({"params": half}, TOKENS, True, method="hidden").dtype == jnp.bfloat16
    assert lm.apply({"params": half}, 1, 4, method="empty_cache").k.dtype == jnp.bfloat16


def test_initial_values_follow_the_table():
    config = Gpt2Config(hidden_dim=64, num_heads=4, num_layers=8, seq_len=256, initializer_range=0.05)
    params = flatten(nn.meta.unbox(jax.jit(Gpt2LM(config, 512).init)(jax.random.key(3), TOKENS[:, :2]))["params"])
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
