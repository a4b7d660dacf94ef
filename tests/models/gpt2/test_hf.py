"""GPT-2's table of weights and its `config.json`. `tests/parity/test_variants.py` compares exports and imports."""

import pytest
from models import quick

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import canonical, from_hf_config, table
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.params import flatten
from lmtrain.runtime.errors import UserError

CONFIG = Gpt2Config(hidden_dim=12, num_heads=3, num_layers=2, seq_len=8, mlp_scale=2)


def test_the_table_has_one_row_for_every_parameter():
    assert sorted(row.ours for row in table(CONFIG)) == sorted(flatten(quick.random_params(Gpt2LM(CONFIG, 20))))


@pytest.mark.parametrize(
    ("stored", "known"),
    [
        ("wte.weight", "transformer.wte.weight"),  # a name in the first files
        ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("transformer.ln_f.bias", "transformer.ln_f.bias"),
        ("lm_head.weight", "lm_head.weight"),
        ("h.0.attn.bias", None),  # a causal mask
        ("transformer.h.0.attn.masked_bias", None),
        ("h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"),
    ],
)
def test_names_in_older_files_are_mapped(stored, known):
    assert canonical(stored, Gpt2Config()) == known


def test_attention_without_scaling_is_refused():
    with pytest.raises(UserError, match="scale_attn_weights false"):
        from_hf_config({"model_type": "gpt2", "scale_attn_weights": False})


def test_an_empty_config_is_the_124m_model_with_its_dropouts():
    config = Gpt2Config(**from_hf_config({"model_type": "gpt2"}))
    assert config == Gpt2Config(embed_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
