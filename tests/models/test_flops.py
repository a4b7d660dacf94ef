"""The formulas against counts in the models' own programs, and against figures calculated by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from lmtrain.models.attention import xla
from lmtrain.models.attention.attend import attend
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig, MtpConfig
from lmtrain.models.mixer import mean_keys
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.registry import build_model

VOCAB, LENGTH = 512, 128  # no padding of the vocabulary
SIZES = {"hidden_dim": 256, "num_heads": 8, "num_layers": 2, "seq_len": LENGTH}
CONFIGS = {
    "gpt2": Gpt2Config(**SIZES),
    "gpt2, narrow and untied": Gpt2Config(**SIZES, intermediate_dim=600, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, intermediate_dim=700),
    "llama without a gate": LlamaConfig(**SIZES, intermediate_dim=700, gated_mlp=False),
    "llama, grouped and wide heads": LlamaConfig(**SIZES, intermediate_dim=300, num_kv_heads=2, head_dim=48),
    "llama, latent": LlamaConfig(**SIZES, intermediate_dim=300, latent_attention={"v_head_dim": 96}),
    "llama, two latents": LlamaConfig(**SIZES, intermediate_dim=300, latent_attention={"q_lora_rank": 80}),
    "mpt": MptConfig(**SIZES, mlp_scale=3),
    "backpack": BackpackConfig(**SIZES, num_senses=4),
    "backpack, narrow": BackpackConfig(**SIZES, num_senses=16, intermediate_dim=600, sense_intermediate_scale=2),
}


def test_a_module_that_predicts_another_token_takes_12_percent_of_deepseek_v2_lite():
    latent = LlamaConfig(
        hidden_dim=2048, intermediate_dim=10944, num_heads=16, num_layers=27, seq_len=4096, latent_attention={},
        moe={"num_experts": 64, "experts_per_token": 6, "intermediate_dim": 1408, "shared_experts": 2,
             "first_dense_layers": 1},
    )  # fmt: skip
    without, with_module = (
        config.num_flops_per_token(102_400, causal=True)
        for config in (latent, latent.model_copy(update={"mtp": MtpConfig()}))
    )
    assert 0.10 < (with_module - without) / with_module < 0.12


def products(jaxpr) -> int:
    """Operations of all matrix products in a program, loops unrolled."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[i] for i in contracted)
        times = equation.params.get("length", 1)
        total += sum(times * products(inner) for inner in jaxprs_in_params(equation.params))
    return total


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_formulas_equal_the_matrix_products_and_nearly_all_flops(monkeypatch, config):
    # the split of attention into halves is not part of the convention
    plain = dataclasses.replace(xla.KERNEL, call=lambda q, k, v, scale, options: attend(q, k, v, scale))
    monkeypatch.setattr(xla, "KERNEL", plain)
    model = build_model(config, VOCAB)
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    traced = jax.jit(model.apply).trace(params, tokens)
    formula = config.num_flops_per_token(VOCAB) * 2 * LENGTH
    assert products(traced.jaxpr.jaxpr) == formula

    if config not in (CONFIGS["llama"], CONFIGS["backpack"]):
        return
    unrolled = build_model(config.model_copy(update={"scan_layers": False, "gradient_checkpointing": False}), VOCAB)
    counted = jax.jit(unrolled.apply).lower(params, tokens).cost_analysis()["flops"]
    assert formula < counted < 1.05 * formula


def test_the_published_small_gpt2_calculated_by_hand():
    projections = 2 * 768 * 3 * 768 + 2 * 768 * 768
    scores_and_values = 2 * 768 * 1024 * 2
    mlp = 2 * 768 * 3072 * 2
    assert 12 * (projections + scores_and_values + mlp) + 2 * 768 * 50257 == 284_812_800
    assert Gpt2Config().num_flops_per_token(50257) == 284_812_800


@pytest.mark.parametrize(
    ("config", "per_key", "keys"),
    [
        (Gpt2Config(**SIZES), 2 * 4 * 256, LENGTH),
        (LlamaConfig(**SIZES, head_dim=48, num_kv_heads=2), 2 * 4 * 8 * 48, LENGTH),
        (LlamaConfig(**SIZES, sliding_window=10), 2 * 4 * 256, 10),
        (MptConfig(**SIZES), 2 * 4 * 256, LENGTH),
        (BackpackConfig(**SIZES, num_senses=4), 2 * 4 * 256 + 2 * 256 + 2 * 4 * 256, LENGTH),
    ],
    ids=["gpt2", "llama", "window", "mpt", "backpack"],
)
def test_causal_counts_the_keys_a_query_sees_and_nothing_else_differs(config, per_key, keys):
    """1, 2, ... keys, up to those of a window."""
    seen = (keys * (keys + 1) / 2 + keys * (LENGTH - keys)) / LENGTH
    difference = config.num_flops_per_token(VOCAB) - config.num_flops_per_token(VOCAB, causal=True)
    assert difference == pytest.approx(per_key * (keys - seen))


def test_layers_that_differ_count_their_own_keys():
    whole, window, mixed = (
        LlamaConfig(**SIZES | {"num_layers": 3}, sliding_window=size, layer_pattern=pattern)
        for size, pattern in ((None, None), (10, None), (10, ["sliding", "full"]))
    )
    for causal in (False, True):
        one, other, both = (c.num_flops_per_token(VOCAB, causal=causal) for c in (whole, window, mixed))
        assert both == pytest.approx((one + 2 * other) / 3)


@pytest.mark.parametrize(("length", "window"), [(1, None), (1, 1), (2, 3), (8, None), (8, 3), (8, 8)])
def test_mean_keys_is_a_count(length, window):
    pairs = [(s, t) for s in range(length) for t in range(length)]
    seen = [(s, t) for s, t in pairs if t <= s and (window is None or t > s - window)]
    assert mean_keys(length, causal=True, window=window) == pytest.approx(len(seen) / length)
    assert mean_keys(length, causal=False, window=window) == (length if window is None else min(window, length))
