"""Backpack's table of weights, and its `config.json`. `tests/parity/test_backpack.py` compares the exported model."""

import pytest
from models import quick

from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.backpack.hf import canonical, extra_files, from_hf_config, reads, table, to_hf_config
from lmtrain.models.backpack.model import BackpackLM
from lmtrain.models.params import flatten

CONFIG = BackpackConfig(hidden_dim=12, num_heads=3, num_layers=2, seq_len=8, num_senses=4, mlp_scale=2)


@pytest.mark.parametrize("use_bias", [True, False])
def test_the_table_has_one_row_for_every_parameter(use_bias):
    config = CONFIG.model_copy(update={"use_bias": use_bias})
    params = flatten(quick.random_params(BackpackLM(config, 20)))
    assert sorted(row.ours for row in table(config) if hasattr(row, "ours")) == sorted(params)
    assert len(table(config)) == len(table(CONFIG))


def test_a_config_is_read_as_it_was_written():
    values = to_hf_config(CONFIG, 20, eos_id=3, bos_id=None)
    assert reads(values)
    again = BackpackConfig(**from_hf_config(values))
    assert again.meaning() == CONFIG.meaning()
    assert values["auto_map"]["AutoModelForCausalLM"] == "modeling_backpack.BackpackLMHeadModel"
    assert b"class BackpackLMHeadModel" in extra_files()["modeling_backpack.py"]


def test_the_published_file_lacks_the_settings_of_its_code():
    config = BackpackConfig(**from_hf_config({"model_type": "gpt2", "num_senses": 16}))
    assert (config.seq_len, config.scale_attn_by_inverse_layer_idx, config.divide_by_num_senses) == (512, True, False)


@pytest.mark.parametrize(
    ("stored", "known"),
    [
        ("backpack.word_embeddings.weight", None),
        ("backpack.position_embeddings.weight", None),
        ("backpack.gpt2_model.h.0.attn.bias", None),
        ("backpack.gpt2_model.h.0.attn.c_attn.bias", "backpack.gpt2_model.h.0.attn.c_attn.bias"),
    ],
)
def test_masks_and_second_names_of_published_files_are_left_out(stored, known):
    assert canonical(stored, BackpackConfig()) == known
