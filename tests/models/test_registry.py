"""Model and Hugging Face table of a config."""

import pytest

from lmtrain.config.describe import sections_of
from lmtrain.models.config import ModelConfig
from lmtrain.models.decoder import Decoder
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.registry import build_model, family_of, hf_family
from lmtrain.runtime.errors import UserError


def test_a_gpt2_config_gives_a_gpt2_with_that_config_and_vocabulary():
    config = Gpt2Config(hidden_dim=8, num_heads=2)
    model = build_model(config, 77)
    assert type(model) is Gpt2LM
    assert (model.config, model.vocab_size) == (config, 77)


@pytest.mark.parametrize("config", sections_of(ModelConfig))
def test_every_family_offers_what_the_engine_uses(config):
    model, table = build_model(config(), 77), hf_family(config().type)
    assert isinstance(model, Decoder)
    for method in ("hidden", "head", "logits", "empty_cache", "extend", "has_dropout"):
        assert hasattr(model, method), method
    for function in ("table", "canonical", "to_hf_config", "from_hf_config", "DEFAULT_REF", "MODEL_TYPES"):
        assert hasattr(table, function), function
    assert table.PUBLISHED_DTYPE in ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("values", "family"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen3"}, "llama"),
        ({"model_type": "mpt"}, "mpt"),
        ({"model_type": "backpack-gpt2"}, "backpack"),
        ({"model_type": "gpt2", "num_senses": 16}, "backpack"),  # the published Backpack's values
    ],
)
def test_the_values_of_a_file_select_the_family(values, family):
    assert family_of(values) is hf_family(family)


def test_an_unknown_model_is_an_error_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"model_type 'bert' is not supported; expected one of gpt2, llama, mistral, qwen2"
    ):
        family_of({"model_type": "bert"})
