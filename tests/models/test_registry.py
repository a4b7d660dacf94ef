"""Model and Hugging Face table of a config."""

import pytest

from lmtrain.config.describe import sections_of
from lmtrain.models.config import ModelConfig
from lmtrain.models.decoder import Decoder
from lmtrain.models.registry import build_model, family_of, hf_family
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize("config", sections_of(ModelConfig))
def test_every_family_offers_what_the_engine_uses(config):
    model, table = build_model(config(), 77), hf_family(config().type)
    assert isinstance(model, Decoder)
    assert (model.config, model.vocab_size) == (config(), 77)
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
    with pytest.raises(UserError, match=r"model_type 'bert' .* gpt2, llama, mistral, qwen2"):
        family_of({"model_type": "bert"})
