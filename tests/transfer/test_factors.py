"""Factors of each kind of parameter; a base equal to the model changes nothing."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from lmtrain.models.params import flatten, initializer, unflatten
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import build_program
from lmtrain.transfer.factors import describe, factors_of

VOCAB = 64
MOE = {"num_experts": 4, "shared_experts": 1, "router": "sigmoid", "bias_update_rate": 0.01}
MODELS = {
    "gpt2": {"type": "gpt2"},
    "gpt2, untied": {"type": "gpt2", "tie_word_embeddings": False},
    "llama": {"type": "llama", "use_bias": True, "use_mlp_bias": True},
    "gemma": {"type": "llama", "norm_position": "both", "norm_offset": True, "scale_embeddings": True}
    | {"tie_word_embeddings": True, "qk_norm": "head"},
    "mpt": {"type": "mpt"},
    "backpack": {"type": "backpack", "num_senses": 4},
    "mixture": {"type": "llama", "moe": MOE, "layer_pattern": [{"mlp": "dense"}, "full"]},
}


def config(name, width=64, layers=2, base=None, **sections):
    """A model of this width, with heads of 16, and the base with the width 32 and 2 layers unless given."""

    def sizes(width, layers):
        found = {"hidden_dim": width, "num_heads": width // 16, "num_layers": layers}
        return found | ({"intermediate_dim": 2 * width} if MODELS[name]["type"] == "llama" else {})

    settings = MODELS[name] | sizes(width, layers) | {"seq_len": 16, "gradient_checkpointing": False}
    base = sizes(32, 2) if base is None else base
    if "moe" in settings:
        settings["moe"] = MOE | {"intermediate_dim": width}
        base = base | {"moe": {"intermediate_dim": 32}}
    return RunConfig.model_validate({"model": settings, "transfer": {"base": base}, **sections})


def factors(config):
    return factors_of(config.model, config.transfer.base, config.optimizer)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adam") for name in MODELS), ("mixture", "muon")],
)
def test_a_base_equal_to_the_model_has_no_factor(name, optimizer):
    found = factors(config(name, width=32, optimizer={"type": optimizer}))
    for factor in found.values():
        assert np.all(np.array([np.unique(x) for x in (factor.initial, factor.rate, factor.gradient)]) == 1)
        assert (factor.epsilon, factor.offset) == (1, 0)


def test_such_a_run_is_the_run_without_transfer_to_the_last_bit():
    same = config("llama", width=32, trainer={"train_batch_size": 8, "num_train_steps": 3})
    without = same.model_copy(update={"transfer": None})
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (8, 16)), "loss_mask": np.ones((8, 16), bool)}
    params = []
    for run in (same, without):
        program = build_program(run, VOCAB)
        state = program.init()
        for _ in range(3):
            state, *_ = program.train_step(state, jax.device_put(batch, program.layout.batch))
        params.append(jax.tree.leaves(jax.device_get(state.params)))
    for here, there in zip(*params, strict=True):
        assert here.tobytes() == there.tobytes()


# initial values, rate, multiplier of the gradient, epsilon, offset; width 128 and 4 layers, 4 and 2 times the base's
EXPECTED = {
    "llama": {
        "tokens/embedding": (1, 1, 1, 1 / 4, 0),
        "blocks/attn/q/kernel": (1 / 2, 1 / 4, 1, 1 / 8, 0),
        "blocks/mlp/gate/kernel": (1 / 2, 1 / 4, 1, 1 / 8, 0),
        "blocks/mlp/down/kernel": (1 / 4, 1 / 8, 1 / 2, 1 / 8, 0),
        "blocks/mlp/down/bias": (1 / 2, 1 / 2, 1 / 2, 1 / 8, 0),
        "blocks/attn/q/bias": (1, 1, 1, 1 / 8, 0),
        "blocks/norm_mlp/scale": (1, 1, 1, 1 / 8, 0),
        "norm_final/scale": (1, 1, 1, 1 / 4, 0),
        "unembed/embedding": (1 / 4, 1 / 4, 1 / 4, 1 / 4, 0),
    },
    # its out and down begin with the spread of the base's depth
    "gpt2": {
        "blocks/attn/out/kernel": (2**0.5 / 4, 1 / 8, 1 / 2, 1 / 8, 0),
        "norm_final/bias": (1 / 4, 1 / 4, 1 / 4, 1 / 4, 0),
        "positions/embedding": (1, 1, 1, 1 / 4, 0),
    },
    # matrices and table begin with the spread of the base's number of inputs
    "mpt": {
        "blocks/attn/qkv/kernel": (1, 1 / 4, 1, 1 / 8, 0),
        "blocks/mlp/down/kernel": (2**0.5 / 2, 1 / 8, 1 / 2, 1 / 8, 0),
        "tokens/embedding": (2, 1, 1, 1 / 4, 0),
    },
    "gemma": {
        "tokens/embedding": (1 / 2, 1 / 2, 1 / 2, 1 / 4, 0),
        "norm_final/scale": (1 / 2, 1 / 2, 1 / 2, 1 / 4, -1 / 2),
        "blocks/mlp/down/kernel": (1 / 2, 1 / 4, 1, 1 / 8, 0),
        "blocks/norm_added/scale": (1 / 2, 1 / 2, 1 / 2, 1 / 8, -1 / 2),
        "blocks/norm_mlp/scale": (1, 1, 1, 1 / 8, 0),
    },
    "backpack": {
        "norm_final/scale": (1, 1, 1, 1 / 4, 0),
        "senses/mlp/down/kernel": (1 / 2, 1 / 4, 1, 1 / 4, 0),
        "senses/to_senses/down/kernel": (1 / 8, 1 / 16, 1 / 4, 1 / 4, 0),
    },
    "mixture": {
        "blocks/moe/router/kernel": (1 / 2, 1 / 4, 1, 1 / 8, 0),
        "blocks/moe/router/balance_bias": (1, 1, 1, 1, 0),
        "blocks/moe/experts/up/kernel": (1 / 2, 1 / 4, 1, 1 / 8, 0),
        "blocks/moe/experts/down/kernel": (1 / 4, 1 / 8, 1 / 2, 1 / 8, 0),
        "blocks/moe/shared/down/kernel": (1 / 4, 1 / 8, 1 / 2, 1 / 8, 0),
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_factors_of_each_kind_of_parameter(name):
    found = factors(config(name, width=128, layers=4))
    for path, expected in EXPECTED[name].items():
        factor = found[path]
        values = (factor.initial, factor.rate, factor.gradient, factor.epsilon, factor.offset)
        assert values == pytest.approx(expected), path
    assert {line.split()[0] for line in describe(found)} >= EXPECTED[name].keys()


def test_queries_have_the_ratio_of_the_widths_of_heads():
    base = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2}  # heads of 8 instead of 16: scores 1 / width
    found = factors(config("gpt2", width=128, base=base))["blocks/attn/qkv/kernel"]
    np.testing.assert_allclose(np.ravel(found.gradient), [0.5**0.5, 1, 1])
    np.testing.assert_allclose(np.ravel(found.initial), [0.5**1.5, 0.5, 0.5])
    senses = factors(config("backpack", width=128))["weigh/kernel"]
    np.testing.assert_allclose(np.ravel(senses.gradient), [0.5, 1])


@pytest.mark.parametrize(("kimi", "down"), [(False, 1 / 2), (True, 1 / 4)])
def test_muon_scales_its_matrices_by_the_multiplier(kimi, down):
    found = factors(config("llama", width=128, layers=4, optimizer={"type": "muon", "use_kimi_scaling": kimi}))
    assert found["blocks/mlp/down/kernel"].rate == down
    assert found["blocks/mlp/up/kernel"].rate == 2 * down
    assert found["unembed/embedding"].rate == 1 / 4


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_epsilon_follows_the_gradient(name):
    """At the initial values, of 4 times the width and twice the depth: the root mean square of each gradient with its
    factor, relative to the base's."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 17))

    def sizes(run):
        model, found = build_model(run.model, VOCAB), factors(run)
        params = flatten(nn.meta.unbox(jax.jit(initializer(model))(jax.random.key(0))))
        params = {path: params[path] * factor.initial + factor.offset for path, factor in found.items()}

        def loss(params):
            logits = model.apply({"params": unflatten(params)}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        gradients = jax.jit(jax.grad(loss))(params)
        return {path: np.sqrt(np.mean(np.square(gradients[path] * found[path].gradient))) for path in params}

    large, base = config(name, width=128, layers=4), config(name, width=32)
    of_base = sizes(base)
    for path, size in sizes(large).items():
        if of_base[path] > 1e-6 * max(of_base.values()):  # a bias on keys has no gradient
            assert size / of_base[path] == pytest.approx(factors(large)[path].epsilon, rel=0.5), path
