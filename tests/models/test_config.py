"""The `model` section: one of the families, selected by its type."""

import json
from typing import get_args

import pytest
from pydantic import Tag, TypeAdapter, ValidationError

from lmtrain.config.spellings import _REFERENCE_FAMILIES
from lmtrain.models.config import FAMILY_NAMES, ModelConfig
from lmtrain.models.gpt2.config import Gpt2Config

MODEL = TypeAdapter(ModelConfig)
MEMBERS = [get_args(member) for member in get_args(get_args(ModelConfig)[0])]

SIZES = {"seq_len": 8, "hidden_dim": 24, "num_layers": 3, "num_heads": 4, "scan_layers": False}
CHANGED = {
    "gpt2": {"mlp_scale": 2, "attn_pdrop": 0.25, "upcast_attn": True},
    "llama": {
        "num_kv_heads": 2,
        "head_dim": 6,
        "activation_function": "gelu",
        "rope": {"type": "yarn", "factor": 4, "original_seq_len": 4},
    },
    "mpt": {"use_bias": True, "clip_qkv": 6.5, "softmax_scale": 0.125},
    "backpack": {"num_senses": 6, "divide_by_num_senses": True, "scale_attn_by_inverse_layer_idx": False},
}


def test_the_names_of_families_are_the_types_of_the_members_and_their_aliases():
    types = tuple(config.model_fields["type"].default for config, _ in MEMBERS)
    assert types == FAMILY_NAMES
    assert set(_REFERENCE_FAMILIES) <= set(types)


def test_each_member_is_selected_by_its_type():
    assert [tag for _, tag in MEMBERS] == [Tag(config.model_fields["type"].default) for config, _ in MEMBERS]
    assert [type(MODEL.validate_python({"type": name})) for name in FAMILY_NAMES] == [config for config, _ in MEMBERS]


@pytest.mark.parametrize("settings", [{}, {"num_layers": 3, "mlp_scale": 2}])
def test_a_model_without_a_type_is_gpt2(settings):
    assert MODEL.validate_python(settings) == Gpt2Config(**settings)


@pytest.mark.parametrize("settings", [{}, SIZES], ids=["defaults", "other sizes"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_reads_back_what_it_writes(family, settings):
    config = MODEL.validate_python({"type": family} | settings | (CHANGED[family] if settings else {}))
    dumped = json.loads(json.dumps(config.model_dump(mode="json")))
    assert dumped.items() >= {"type": family, **settings}.items()
    again = MODEL.validate_python(dumped)
    assert type(again) is type(config)
    assert again == config


@pytest.mark.parametrize("wrong", ["gpt3", "GPT2", "", None, 2, ["gpt2"]])
def test_an_unknown_type_is_refused(wrong):
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        MODEL.validate_python({"type": wrong})
