"""Unsupported settings of a file are refused by name, in both formats of files."""

import pytest

from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.mpt.hf import from_hf_config, table, to_hf_config
from lmtrain.runtime.errors import UserError

PUBLISHED = {
    "model_type": "mpt",
    "architectures": ["MPTForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0.0, "qk_ln": False},
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "expansion_ratio": 4,
    "learned_pos_emb": True,  # disabled with alibi in its own code
    "max_seq_len": 128,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
}


def test_a_published_file_is_imported():
    config = MptConfig(**from_hf_config(PUBLISHED))
    assert (config.hidden_dim, config.num_heads, config.num_layers, config.seq_len) == (64, 4, 2, 128)
    assert (config.alibi_bias_max, config.clip_qkv, config.use_bias, config.attn_pdrop) == (8.0, None, False, 0.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_type": "rmsnorm"}, "norm_type rmsnorm"),
        ({"ffn_config": {"ffn_act_fn": {"name": "silu"}}}, "ffn_config"),
        ({"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale inv_sqrt_d_model"),
        ({"block_overrides": {"order": []}}, "block_overrides"),
        ({"embedding_fraction": 0.5}, "embedding_fraction 0.5"),
        ({"expansion_ratio": 2}, "expansion_ratio 2"),
        ({"no_bias": False}, "no_bias false"),
        ({"attn_config": {}}, "attn_config has no alibi"),
        ({"attn_config": {"alibi": False}}, "attn_config.alibi False"),
        ({"attn_config": {"alibi": True, "rope": True}}, "attn_config.rope True"),
        ({"attn_config": {"alibi": True, "sliding_window_size": 8}}, "attn_config.sliding_window_size 8"),
        ({"attn_config": {"alibi": True, "attn_type": "multiquery_attention"}}, "attn_config.attn_type multiquery"),
        ({"attn_config": {"alibi": True, "qk_ln": True}}, "attn_config.qk_ln True"),
    ],
)
def test_settings_other_than_plain_mpt_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=named):
        from_hf_config(PUBLISHED | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bias": True}, "model.use_bias"),
        ({"alibi_bias_max": 4.0}, "model.alibi_bias_max: 4.0"),
        ({"mlp_scale": 2}, "model.mlp_scale: 2"),
    ],
)
def test_settings_that_transformers_does_not_support_are_refused_by_name(changes, named):
    config = MptConfig(**changes)
    with pytest.raises(UserError, match=named):
        table(config), to_hf_config(config, 90, None, None)
