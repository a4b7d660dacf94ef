"""GPT-2: every way to run it gives the same numbers, and a fresh one has the promised initial values."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

VOCAB = 19
TINY = {"seq_len": 9, "hidden_dim": 8, "num_heads": 2, "num_layers": 3, "mlp_scale": 2}
DROPOUT = {"embed_pdrop": 0.2, "resid_pdrop": 0.3, "attn_pdrop": 0.4}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 9), dtype=np.int32)


def tiny(**changes):
    return Gpt2LM(Gpt2Config(**(TINY | changes)), VOCAB)


def random_params(model, seed=0):
    """Every parameter random and of size 0.5, norms and biases included."""
    random = np.random.default_rng(seed)
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"])
    return jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)


def value_and_gradients(model, params, deterministic):
    """Hidden states, and gradients of a fixed random projection of them."""
    direction = np.random.default_rng(1).normal(size=(*TOKENS.shape, 8)).astype(np.float32)

    def loss(params):
        rngs = {} if deterministic else {"dropout": jax.random.key(3)}
        hidden = model.apply({"params": params}, TOKENS, deterministic, method="hidden", rngs=rngs)
        return (hidden * direction).sum(), hidden

    gradients, hidden = jax.jit(jax.grad(loss, has_aux=True))(params)
    return {"hidden": hidden, "gradients": gradients}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "dropout"])
def reference(request):
    """The scanned model without recomputation: dropout settings, parameters, results."""
    dropout = DROPOUT if request.param else {}
    model = tiny(**dropout, scan_layers=True, gradient_checkpointing=False)
    params = random_params(model)
    return dropout, params, value_and_gradients(model, params, not dropout)


@pytest.mark.parametrize(("scan", "remat"), [(True, True), (False, False), (False, True)])
def test_scan_unroll_and_recomputation_give_the_same_outputs_and_gradients(reference, scan, remat):
    dropout, params, expected = reference
    got = value_and_gradients(
        tiny(**dropout, scan_layers=scan, gradient_checkpointing=remat), params, deterministic=not dropout
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), got, expected)


def test_every_parameter_has_a_gradient(reference):
    _, _, result = reference
    dead = [path for path, g in jax.tree_util.tree_leaves_with_path(result["gradients"]) if not np.abs(g).max() > 1e-3]
    assert dead == []


@pytest.mark.parametrize("name", list(DROPOUT))
def test_each_dropout_setting_changes_training_but_not_evaluation(name):
    plain, dropped = tiny(), tiny(**{name: 0.5})
    params = {"params": random_params(plain)}
    hidden = plain.apply(params, TOKENS, True, method="hidden")
    assert np.array_equal(dropped.apply(params, TOKENS, True, method="hidden"), hidden)
    first, again, other = (
        dropped.apply(params, TOKENS, False, method="hidden", rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    )
    assert not np.allclose(first, hidden)
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.parametrize("pieces", [[9], [5, 4], [4, 1, 1, 1, 1, 1], [1] * 9], ids=str)
@pytest.mark.parametrize("changes", [{}, {"scan_layers": False, "scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_extend_with_a_cache_equals_the_full_forward(pieces, changes):
    model = tiny(**changes)
    params = {"params": random_params(model)}
    extend = jax.jit(lambda tokens, cache, start: model.apply(params, tokens, cache, start, method="extend"))
    cache, start, logits = model.apply(params, 2, 9, method="empty_cache"), 0, []
    for size in pieces:
        part, cache = extend(TOKENS[:, start : start + size], cache, start)
        logits.append(part)
        start += size
    np.testing.assert_allclose(np.concatenate(logits, axis=1), model.apply(params, TOKENS), rtol=1e-4, atol=1e-4)


def test_a_cache_longer_than_the_text_changes_nothing():
    model = tiny()
    params = {"params": random_params(model)}
    cache = model.apply(params, 2, 40, method="empty_cache")
    logits, cache = model.apply(params, TOKENS, cache, 0, method="extend")
    assert cache.k.shape == (3, 2, 2, 40, 4)
    np.testing.assert_allclose(logits, model.apply(params, TOKENS), rtol=1e-4, atol=1e-4)


def test_logits_at_a_position_do_not_depend_on_later_tokens():
    model = tiny()
    params = {"params": random_params(model)}
    changed = TOKENS.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    before, after = model.apply(params, TOKENS), model.apply(params, changed)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_shorter_texts_use_the_first_positions():
    model = tiny()
    params = {"params": random_params(model)}
    full = model.apply(params, TOKENS)
    np.testing.assert_allclose(model.apply(params, TOKENS[:, :4]), full[:, :4], rtol=1e-4, atol=1e-4)


def test_the_head_is_the_embedding_table():
    model = tiny()
    params = random_params(model)
    head = model.apply({"params": params}, method="head")
    assert np.array_equal(head, params["tokens"]["embedding"])
    hidden = model.apply({"params": params}, TOKENS, True, method="hidden")
    np.testing.assert_allclose(model.apply({"params": params}, TOKENS), hidden @ head.T, rtol=1e-4, atol=1e-5)


def test_bfloat16_parameters_give_bfloat16_hidden_states_and_cache_but_float32_logits():
    model = tiny()
    params = {"params": jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), random_params(model))}
    assert model.apply(params, TOKENS, True, method="hidden").dtype == jnp.bfloat16
    cache = model.apply(params, 2, 9, method="empty_cache")
    logits, cache = model.apply(params, TOKENS, cache, 0, method="extend")
    assert (cache.k.dtype, cache.v.dtype, logits.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


N, R = 3, 0.05
INITIAL = {  # by path: mean and standard deviation
    "tokens/embedding": (0, R),
    "positions/embedding": (0, R),
    "blocks/attn/qkv/kernel": (0, R),
    "blocks/attn/qkv/bias": (0, 0),
    "blocks/attn/out/kernel": (0, R / (2 * N) ** 0.5),
    "blocks/attn/out/bias": (0, 0),
    "blocks/mlp/up/kernel": (0, R),
    "blocks/mlp/up/bias": (0, 0),
    "blocks/mlp/down/kernel": (0, R / (2 * N) ** 0.5),
    "blocks/mlp/down/bias": (0, 0),
    "blocks/norm_attn/scale": (1, 0),
    "blocks/norm_attn/bias": (0, 0),
    "blocks/norm_mlp/scale": (1, 0),
    "blocks/norm_mlp/bias": (0, 0),
    "norm_final/scale": (1, 0),
    "norm_final/bias": (0, 0),
}


def test_initial_values_follow_the_table():
    config = Gpt2Config(seq_len=256, hidden_dim=64, num_heads=4, num_layers=N, initializer_range=R)
    params = nn.meta.unbox(jax.jit(Gpt2LM(config, 300).init)(jax.random.key(0), TOKENS)["params"])
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert leaves.keys() == INITIAL.keys()
    for path, (mean, std) in INITIAL.items():
        parts = leaves[path] if path.startswith("blocks") else [leaves[path]]
        for part in parts:  # each layer by itself
            assert part.std() == pytest.approx(std, rel=0.04), path
            assert part.mean() == pytest.approx(mean, abs=0.04 * std), path
