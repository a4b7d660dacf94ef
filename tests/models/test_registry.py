"""From a config to its model and its Hugging Face table."""

from lmtrain.config.describe import sections_of
from lmtrain.models.config import ModelConfig
from lmtrain.models.gpt2 import hf
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.registry import FAMILIES, build_model, hf_family


def test_a_gpt2_config_gives_a_gpt2_with_that_config_and_vocabulary():
    config = Gpt2Config(hidden_dim=8, num_heads=2)
    model = build_model(config, 77)
    assert type(model) is Gpt2LM
    assert (model.config, model.vocab_size) == (config, 77)


def test_a_gpt2_config_gives_the_gpt2_table():
    assert hf_family(Gpt2Config()) is hf


def test_a_family_with_a_model_is_not_only_planned_and_the_other_way_round():
    configs = {section.model_fields["type"].default: section for section in sections_of(ModelConfig)}
    assert configs.keys() >= FAMILIES.keys()
    assert {name for name, config in configs.items() if not config.is_planned} == FAMILIES.keys()
