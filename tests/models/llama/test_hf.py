"""The `config.json` of Llama's family: read as transformers 5 does, written for it, or refused if that is impossible.

`tests/parity/test_variants.py` compares all kinds of models with transformers."""

import pytest

from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.hf import from_hf_config, to_hf_config
from lmtrain.models.llama.relatives import RELATIVES
from lmtrain.runtime.errors import UserError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def read(kind="llama", **values):
    return from_hf_config({"model_type": kind, **SIZES, **values})


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
WINDOW_OF_QWEN = {**WINDOW, "max_window_layers": 0, "layer_types": [SLIDING] * 4}
ACT, TANH = "activation_function", "gelu_pytorch_tanh"
OTHERS = sorted(set(RELATIVES) - {"llama", "smollm3", "arcee"})


@pytest.mark.parametrize(
    ("kind", "values", "name", "expected"),
    [
        ("llama", {}, ACT, "silu"),
        ("llama", {"hidden_act": "gelu", "hidden_activation": "relu"}, ACT, "gelu"),  # the second is only for Gemma
        ("gemma", {}, ACT, "gelu_new"),
        ("gemma", {"hidden_act": "gelu"}, ACT, "gelu_new"),  # in the first files, which use the approximation
        ("gemma", {"hidden_act": "gelu", "hidden_activation": TANH}, ACT, "gelu_new"),
        ("gemma", {"hidden_activation": None, "hidden_act": "relu"}, ACT, "relu"),
        ("gemma2", {"hidden_activation": "gelu"}, ACT, "gelu"),
        ("gemma3_text", {"hidden_act": "silu"}, ACT, "gelu_new"),
        ("arcee", {}, ACT, "relu2"),
        ("mistral", {}, "sliding_window", 4096),
        ("mistral", {"sliding_window": None}, "sliding_window", None),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 4}, "sliding_window", 8),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 4}, "sliding_window", None),
        ("qwen2", {"sliding_window": 8}, "sliding_window", None),
        ("qwen2", WINDOW, "sliding_window", None),  # default: from layer 28 on
        ("qwen2", WINDOW | {"max_window_layers": 0}, "sliding_window", 8),
        *((kind, WINDOW_OF_QWEN, "sliding_window", None) for kind in ("llama", "gemma", "olmo2")),  # without windows
        ("mistral", {}, "num_kv_heads", 8),  # keys that a file lacks have the values of transformers
        ("mistral", {"num_key_value_heads": None}, "num_kv_heads", 4),
        ("llama", {}, "num_kv_heads", 4),
        ("llama", {"mlp_bias": True}, "use_mlp_bias", True),
        *((kind, {"mlp_bias": True}, "use_mlp_bias", False) for kind in OTHERS if kind != "deepseek_v2"),
        ("qwen2", {"attention_bias": True}, "use_bias", False),
        ("gemma2", {}, "attention_logit_cap", 50.0),
        ("gemma2", {"attn_logit_softcapping": None}, "attention_logit_cap", None),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attention_logit_cap", None),  # which transformers ignores
        ("gemma2", {}, "final_logit_cap", 30.0),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_cap", None),
        ("gemma3_text", {}, "final_logit_cap", None),
        ("llama", {"final_logit_softcapping": 5.0}, "final_logit_cap", None),
        ("gemma2", {}, "query_pre_attn_scalar", 256),
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar", 144),
    ],
)
def test_a_key_is_read_as_transformers_reads_it_for_this_kind(kind, values, name, expected):
    assert read(kind, **values).get(name) == expected


NOPE = {"attention": "full", "rope": False}


@pytest.mark.parametrize(
    ("kind", "values", "pattern"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, ["full", "full", "sliding", "sliding"]),
        ("qwen3", {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2}, ["full", "sliding"]),
        ("gemma2", {}, ["sliding", "full"]),
        ("gemma3_text", {}, None),  # the sixth layer would be full
        ("gemma3_text", {"num_hidden_layers": 7}, [*["sliding"] * 5, "full"]),
        ("gemma3_text", {"sliding_window_pattern": 2}, ["sliding", "full"]),
        ("olmo3", {"num_hidden_layers": 9}, [*["sliding"] * 3, "full"]),
        ("olmo3", {"layer_types": [FULL] * 4}, None),
        ("smollm3", {}, ["full", "full", "full", NOPE]),
        ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}, [NOPE, "full"]),
        (
            "smollm3",
            {"use_sliding_window": True, "no_rope_layer_interval": 2},
            ["full", {"attention": "sliding", "rope": False}],
        ),
    ],
)
def test_the_pattern_of_layers(kind, values, pattern):
    found = read(kind, sliding_window=8, num_key_value_heads=2, **values)
    assert found["layer_pattern"] == pattern
    assert found["sliding_window"] == (8 if "sliding" in str(pattern) or kind == "gemma3_text" else None)
    LlamaConfig.model_validate(found)


FACTOR = 1.2079441541679836  # 0.1 ln(8) + 1
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "attention_factor": FACTOR}


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("gemma3_text", {}, {"theta": 1e6, "local_theta": 1e4}),
        ("gemma3_text", {"num_hidden_layers": 4}, {"theta": 1e4}),  # all sliding
        ("gemma3_text", {"layer_types": [FULL] * 8}, {"theta": 1e6}),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {"type": "linear", "theta": 1e6, "factor": 8.0, "local_theta": 1e4},
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}}},
            {"type": "linear", "theta": 7e5, "factor": 2.0, "local_theta": 1e4},
        ),
        ("olmo3", {}, {"theta": 5e5, "local_theta": 5e5}),
        (
            "olmo3",
            {"rope_scaling": YARN, "rope_theta": 5e5},
            {"type": "yarn", "theta": 5e5, "factor": 8.0, "original_seq_len": 8, "local_theta": 5e5},
        ),
        ("smollm3", {"rope_theta": 5e6}, {"theta": 5e6}),
        ("smollm3", {}, {"theta": 2e6}),
        (
            "arcee",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            {"type": "yarn", "theta": 1e4, "factor": 2.0, "original_seq_len": 64},
        ),
    ],
)
def test_rotary_positions_of_sliding_layers(kind, values, expected):
    found = read(kind, **{"num_hidden_layers": 8, "num_key_value_heads": 2} | values)
    assert found["rope"] == {"type": "default"} | expected
    LlamaConfig.model_validate(found)


def test_a_model_without_rotary_positions_has_none():
    found = read("smollm3", no_rope_layer_interval=1)
    assert found["rope"] == {}
    assert not LlamaConfig.model_validate(found).kinds[0].rope


def test_equal_bases_are_one_rope():
    sizes = {"layer_pattern": ["sliding", "full"], "sliding_window": 4}
    with_local = LlamaConfig(**sizes, rope={"local_theta": 1e4})
    assert with_local.meaning() == LlamaConfig(**sizes).meaning()
    assert to_hf_config(with_local, 90, None, None)["model_type"] == "smollm3"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("olmo3", {"rope_theta": 1e4}, "rope_theta 10000.0"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope type linear",
        ),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "rope yarn with attention_factor"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope linear requires factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor, high_freq_factor"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"layer_types": [SLIDING] * 4}, "sliding_attention"),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL, SLIDING]}, "2 of 4 layers"),
        ("olmo3", {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, "layer_types has 2 .* 4"),
        ("olmo3", {"layer_types": [FULL, SLIDING, "chunked_attention", FULL]}, "chunked_attention"),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "relu"}, "hidden_activation relu"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers has 2"),
    ],
)
def test_what_is_ambiguous_incomplete_or_differs_from_transformers_is_refused_by_name(kind, values, message):
    with pytest.raises(UserError, match=message):
        read(kind, **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"type": "default", "theta": 10_000.0}),
        ({"rope_theta": 5e5}, {"type": "default", "theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"type": "default", "theta": 5e5}),
        # rope_scaling takes precedence over rope_parameters
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            {"type": "linear", "theta": 10_000.0, "factor": 4.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
            {"type": "yarn", "theta": 10_000.0, "factor": 4.0, "original_seq_len": 16},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 16},
            {"type": "yarn", "theta": 10_000.0, "factor": 2.0, "original_seq_len": 16},
        ),
    ],
)
def test_the_rotary_positions(values, expected):
    assert read(**values)["rope"] == expected


OLMO, GEMMA = RELATIVES["olmo3"].settings, RELATIVES["gemma2"].settings
LOCAL, LINEAR = {"local_theta": 5.0}, {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm": "head", "norm_position": "post"}, "model.qk_norm: head, model.norm_position: post"),
        ({"scale_embeddings": True}, "model.scale_embeddings: True"),
        ({"moe": {"router": "sigmoid"}}, "model.moe.router"),
        ({"moe": {"shared_experts": 1}}, "model.moe.shared_experts"),
        ({"moe": {"bias_update_rate": 0.0}}, "model.moe.bias_update_rate"),
        ({"moe": {"router": "sigmoid"}, "layer_pattern": [{"mlp": "dense"}, "full"]}, "; qwen3_moe is closest"),
        ({"sliding_window": 4, "use_qkv_bias": True, "use_bias": True}, "smollm3 is closest, but for use_qkv_bias"),
        (
            {"qk_norm": "head", "use_mlp_bias": True},
            "model.use_mlp_bias: True, model.qk_norm: head",
        ),
        ({"qk_norm": "weightless", "activation_function": "relu2", "gated_mlp": False}, "arcee is .* for qk_norm"),
        ({"layer_pattern": ["sliding", "full"], "norm_offset": True, "sliding_window": 4}, "smollm3 .*norm_offset"),
        (
            {"layer_pattern": ["full", NOPE], "use_qkv_bias": True},
            "model.use_qkv_bias: True together|smollm3 is closest, but for use_qkv_bias",
        ),
        ({"layer_pattern": ["full", NOPE], **OLMO}, "olmo3 is closest, but for layer_pattern"),
        ({"layer_pattern": ["sliding", "full"], **OLMO, "rope": LOCAL, "sliding_window": 4}, "for rope.local_theta"),
        ({"layer_pattern": ["sliding", "full"], **OLMO, "rope": LINEAR, "sliding_window": 4}, "for rope.local_theta"),
        ({"norm_position": "both", **GEMMA, "query_pre_attn_scalar": 2.5}, "model.query_pre_attn_scalar: 2.5"),
        ({"rope": {"type": "dynamic", "factor": 2.0, "original_seq_len": 8}}, "model.rope.original_seq_len"),
    ],
)
def test_settings_that_transformers_does_not_support_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=named):
        to_hf_config(LlamaConfig(seq_len=64, **changes), 90, None, None)


def test_config_json_is_readable_by_both_versions_of_transformers():
    rope = {"type": "llama3", "factor": 8.0, "original_seq_len": 16, "high_freq_factor": 3.0, "theta": 500.0}
    values = to_hf_config(LlamaConfig(rope=rope), 90, None, None)
    assert values["rope_parameters"]["rope_theta"] == values["rope_theta"] == 500.0
    assert values["rope_scaling"] == {name: v for name, v in values["rope_parameters"].items() if name != "rope_theta"}
    assert values["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("kind", "rate", "warned"), [("llama", 0.1, True), ("mixtral", 0.1, True), ("qwen3", 0.0, False)]
)
def test_dropout_on_attention_is_warned_of(caplog, kind, rate, warned):
    read(kind, attention_dropout=rate)
    assert any(f"attention_dropout {rate}" in message for message in caplog.messages) == warned
