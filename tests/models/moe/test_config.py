"""Settings of mixtures of experts."""

import pytest
from pydantic import ValidationError

from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.moe.config import MoeConfig

SIZES = {"hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_layers": 4, "seq_len": 16}
MIXED = ["full", {"attention": "full", "mlp": "dense"}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe": {"num_experts": 4, "experts_per_token": 5}}, "5 .* num_experts, 4"),
        ({"moe": {"router": "topk_softmax", "normalize": False}}, "topk_softmax"),
        ({"layer_pattern": [{"mlp": "moe"}]}, "set moe"),
        ({"moe": {}, "layer_pattern": [{"mlp": "dense"}]}, "layer_pattern"),
        ({"moe": {}, "gated_mlp": False}, "gate"),
        ({"moe": {"first_dense_layers": 4}}, "first_dense_layers"),
        ({"moe": {"first_dense_layers": 3}, "layer_pattern": ["full", {"mlp": "dense"}]}, "layer_pattern"),
        ({"moe": {"num_groups": 2}}, "groups_per_token"),
        ({"moe": {"num_groups": 3, "groups_per_token": 1}}, "num_groups"),
        ({"moe": {"num_groups": 8, "groups_per_token": 2, "router": "sigmoid"}}, "num_groups"),
        ({"moe": {"num_groups": 4, "groups_per_token": 1, "experts_per_token": 3}}, "1: use 2 to 4 groups"),
        ({"latent_attention": {}, "qk_norm": "head"}, "qk_norm"),
        ({"latent_attention": {}, "num_kv_heads": 2}, "num_kv_heads"),
        ({"latent_attention": {}, "attention_sinks": True}, "attention_sinks"),
        ({"latent_attention": {}, "rope": {"partial_rotary_factor": 0.5}}, "rope"),
        ({"latent_attention": {}, "layer_pattern": ["linear"], "linear_attention": {}}, "has attention"),
        ({"rope": {"mscale": 1.0, "type": "yarn", "original_seq_len": 8}}, "mscale_all_dim"),
        ({"rope": {"mscale_all_dim": 1.0, "type": "yarn", "original_seq_len": 8}}, "without mscale"),
        ({"mtp": {"num_modules": 15}}, "num_modules"),
        ({"mtp": {"loss_weight": 0}}, "loss_weight"),
        ({"mtp": {"loss_weight": [[10, 0.3]]}}, "loss_weight"),
        ({"mtp": {"loss_weight": [[0, 0.3], [0, 0.1]]}}, "loss_weight"),
        ({"moe": {}, "use_mlp_bias": True}, "gate"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LlamaConfig(**SIZES, **settings)


def test_all_layers_have_experts_but_those_that_the_pattern_excludes():
    assert LlamaConfig(**SIZES).mixture is None
    assert LlamaConfig(**SIZES, moe={}).mixture == (8, 2, 48, (0, 1, 2, 3))
    mixed = LlamaConfig(**SIZES, moe={"intermediate_dim": 16}, layer_pattern=MIXED)
    assert mixed.mixture == (8, 2, 16, (0, 2))


def test_flops_are_those_of_active_experts():
    dense = LlamaConfig(**SIZES).num_flops_per_token(64)
    moe = LlamaConfig(**SIZES, moe={"intermediate_dim": 24}).num_flops_per_token(64)
    assert moe == dense + 4 * 2 * 32 * 8  # and the routers'
    shared = LlamaConfig(**SIZES, moe={"intermediate_dim": 16, "shared_experts": 1}).num_flops_per_token(64)
    assert shared == moe
    mixed = LlamaConfig(**SIZES, moe={"intermediate_dim": 24}, layer_pattern=MIXED).num_flops_per_token(64)
    assert mixed == dense + 2 * 2 * 32 * 8


def test_equal_functions_have_equal_meanings():
    assert MoeConfig().meaning() == MoeConfig(router="topk_softmax", aux_loss=0.5).meaning()
    assert MoeConfig().meaning() != MoeConfig(normalize=False).meaning()
    assert MoeConfig().meaning() != MoeConfig(bias_update_rate=0.0).meaning()
    one = LlamaConfig(**SIZES, moe={"intermediate_dim": 48}).meaning()
    assert one == LlamaConfig(**SIZES | {"intermediate_dim": 48}, moe={}).meaning()
    assert one == LlamaConfig(**SIZES, moe={}, layer_pattern=["full"]).meaning()
