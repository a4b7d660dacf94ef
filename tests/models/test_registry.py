"""Config -> model and its Hugging Face table, for every family that a config can name."""

from typing import get_args

import numpy as np
import pytest

from lmtrain.models.config import ModelConfig
from lmtrain.models.gpt2 import hf
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.interface import LanguageModel
from lmtrain.models.registry import FAMILIES, build_model, hf_family


def config_classes():
    return get_args(ModelConfig) or (ModelConfig,)


def test_every_family_of_the_config_has_a_row_and_no_row_is_left_over():
    types = [name for cls in config_classes() for name in get_args(cls.model_fields["type"].annotation)]
    assert sorted(types) == sorted(FAMILIES)


def test_gpt2_gives_the_gpt2_model_of_that_config_and_vocabulary():
    config = Gpt2Config(seq_len=5, hidden_dim=8, num_heads=2, num_layers=1)
    model = build_model(config, 17)
    assert isinstance(model, Gpt2LM)
    assert (model.config, model.vocab_size) == (config, 17)
    assert hf_family(config) is hf


@pytest.mark.parametrize("cls", config_classes())
def test_every_family_offers_the_methods_of_the_interface(cls):
    model = build_model(cls(seq_len=5, hidden_dim=8, num_heads=2, num_layers=1), 17)
    methods = [name for name in vars(LanguageModel) if not name.startswith("_")]
    assert {"init", "apply", "hidden", "head", "extend"} <= set(methods)
    assert [name for name in methods if not callable(getattr(model, name, None))] == []


@pytest.mark.parametrize("cls", config_classes())
def test_every_family_has_a_table_and_a_config_with_plain_json_types(cls):
    family = hf_family(cls())
    assert len({row.theirs for row in family.TABLE}) == len(family.TABLE) > 0
    values = family.to_hf_config(cls(), 17, 0, None).values()
    assert not [value for value in values if isinstance(value, np.generic)]
