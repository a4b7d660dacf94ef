"""The `model` section: one of the families, selected by its type; settings that all share, and each family's own."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from lmtrain.models.config import FAMILY_NAMES, ModelConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.runtime.errors import nearest_divisors

MODEL = TypeAdapter(ModelConfig)

SIZES = {"seq_len": 8, "hidden_dim": 24, "num_layers": 3, "num_heads": 4, "scan_layers": False}
YARN = {"type": "yarn", "factor": 4, "original_seq_len": 4}
CHANGED = {
    "gpt2": {"mlp_scale": 2, "attn_pdrop": 0.25, "upcast_attn": True},
    "llama": {"num_kv_heads": 2, "head_dim": 6, "activation_function": "gelu", "rope": YARN},
    "mpt": {"use_bias": True, "clip_qkv": 6.5, "softmax_scale": 0.125},
    "backpack": {"num_senses": 6, "divide_by_num_senses": True, "scale_attn_by_inverse_layer_idx": False},
}
of_every_family = pytest.mark.parametrize("family", FAMILY_NAMES)


def read(family, **settings):
    return MODEL.validate_python({"type": family} | settings)


@pytest.mark.parametrize("settings", [{}, {"num_layers": 3, "mlp_scale": 2}])
def test_a_model_without_a_type_is_gpt2(settings):
    assert MODEL.validate_python(settings) == Gpt2Config(**settings)


@pytest.mark.parametrize("settings", [{}, SIZES], ids=["defaults", "other sizes"])
@of_every_family
def test_every_family_reads_back_what_it_writes(family, settings):
    config = read(family, **settings, **(CHANGED[family] if settings else {}))
    dumped = json.loads(json.dumps(config.model_dump(mode="json")))
    assert dumped.items() >= {"type": family, **settings}.items()
    again = MODEL.validate_python(dumped)
    assert type(again) is type(config)
    assert again == config
    assert (config.gradient_checkpointing, config.scan_layers) == (True, not settings)


@of_every_family
def test_settings_that_no_family_takes_are_refused_by_name(family):
    foreign = "rope" if family != "llama" else "mlp_scale"
    for name, value in [
        *[(foreign, 1), ("hidden", 8), ("seq_len", 1), ("seq_len", 2**31), ("hidden_dim", 0), ("num_layers", True)],
        *[("num_layers", 0), ("num_heads", -1), ("layer_norm_epsilon", 0), ("intermediate_dim", 0)],
        *[("initializer_range", 0.0), ("initializer_range", float("nan"))],
    ]:
        with pytest.raises(ValidationError, match=name):
            read(family, **{name: value})
    with pytest.raises(ValidationError, match="num_heads could be 4 or 8") as refused:
        read(family, hidden_dim=64, num_heads=7)
    assert refused.value.errors()[0]["ctx"]["field"] == "num_heads"


@pytest.mark.parametrize(
    ("family", "settings", "field"),
    [
        ("gpt2", {"mlp_scale": 0}, "mlp_scale"),
        ("gpt2", {"mlp_scale": 2.5}, "mlp_scale"),
        ("gpt2", {"embed_pdrop": 1.0}, "embed_pdrop"),
        ("gpt2", {"resid_pdrop": -0.1}, "resid_pdrop"),
        ("gpt2", {"attn_pdrop": "much"}, "attn_pdrop"),
        ("mpt", {"clip_qkv": 0}, "clip_qkv"),
        ("mpt", {"softmax_scale": -1}, "softmax_scale"),
        ("mpt", {"alibi_bias_max": 0}, "alibi_bias_max"),
        ("mpt", {"init_scheme": "xavier"}, "init_scheme"),
        ("mpt", {"initializer_range": 0.01}, "init_scheme: normal"),
        ("mpt", {"init_scheme": "kaiming", "initializer_range": 0.01}, "init_scheme: normal"),
        ("backpack", {"num_senses": 0}, "num_senses"),
        ("backpack", {"hidden_dim": 48, "num_heads": 4, "num_senses": 7}, "num_senses could be 6 or 8"),
        ("backpack", {"sense_intermediate_scale": 0}, "sense_intermediate_scale"),
        ("backpack", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("llama", {"num_kv_heads": 5}, "num_kv_heads could be"),
        ("llama", {"num_kv_heads": 64}, "num_kv_heads could be"),
        ("llama", {"rope": {"type": "llama3"}}, "required by rope type llama3"),
        ("llama", {"rope": {"type": "yarn", "factor": 2}}, "required by rope type yarn"),
        ("llama", {"rope": {"factor": 2}}, "rope type default"),
        ("llama", {"rope": {"type": "ntk"}}, "rope"),
        ("llama", {"rope": {"type": "linear", "factor": 0.5}}, "factor"),
        ("llama", {"rope": {"low_freq_factor": 4}}, "rope type default"),
        ("llama", {"rope": YARN | {"type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}}, "low_freq"),
    ],
)
def test_values_that_a_family_does_not_take_are_refused(family, settings, field):
    with pytest.raises(ValidationError, match=field):
        read(family, **settings)


def test_widths_that_follow_other_settings():
    sizes = {"hidden_dim": 48, "num_heads": 4}
    assert read("gpt2", **sizes, mlp_scale=3).mlp_dim == read("backpack", **sizes, mlp_scale=3).mlp_dim == 144
    assert read("gpt2", **sizes, intermediate_dim=100).mlp_dim == 100
    assert read("backpack", **sizes, num_senses=6, sense_intermediate_scale=2).sense_width == 8
    assert read("mpt", init_scheme="normal", initializer_range=0.01).initializer_range == 0.01


@pytest.mark.parametrize("number", [1, 2, 9, 30, 97, 144])
def test_no_divisor_is_nearer_than_the_nearest(number):
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for wanted in range(number + 3):
        near = nearest_divisors(number, wanted)
        assert near == sorted(near)
        distances = sorted(abs(n - wanted) for n in divisors)[:2]
        assert sorted(abs(n - wanted) for n in near) == distances


@pytest.mark.parametrize("wrong", ["gpt3", "GPT2", None, ["gpt2"]])
def test_an_unknown_type_is_refused(wrong):
    with pytest.raises(ValidationError, match="tags"):
        read(wrong)
