"""The table of Hugging Face names covers every parameter, and a round trip is bitwise exact."""

import numpy as np
import pytest
from models import quick

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import flatten, to_hf
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import canonical, from_hf_config, table, to_hf_config
from lmtrain.models.gpt2.model import Gpt2LM

CONFIG = Gpt2Config(hidden_dim=12, num_heads=3, num_layers=2, seq_len=8, mlp_scale=2)


@pytest.fixture(scope="module")
def params():
    return quick.random_params(Gpt2LM(CONFIG, 20), 1.0, seed=0)


@pytest.fixture(scope="module")
def tensors(params):
    return to_hf(table(CONFIG), params, num_layers=2, vocab_size=20)


def test_the_table_has_one_row_for_every_parameter(params):
    assert sorted(row.ours for row in table(CONFIG)) == sorted(flatten(params))


def test_padding_of_the_vocabulary_is_not_exported(params, tensors):
    embedding = params["tokens"]["embedding"]
    assert embedding.shape == (128, 12)
    np.testing.assert_array_equal(tensors["transformer.wte.weight"], embedding[:20])


def test_the_columns_of_c_attn_are_q_then_k_then_v_each_head_by_head(params, tensors):
    qkv = params["blocks"]["attn"]["qkv"]
    for part in range(3):
        for head in range(3):
            columns = slice(part * 12 + head * 4, part * 12 + head * 4 + 4)
            weight = tensors["transformer.h.1.attn.c_attn.weight"][:, columns]
            np.testing.assert_array_equal(weight, qkv["kernel"][1, :, part, head])
            bias = tensors["transformer.h.1.attn.c_attn.bias"][columns]
            np.testing.assert_array_equal(bias, qkv["bias"][1, part, head])


def test_the_rows_of_c_proj_are_head_by_head(params, tensors):
    weight = tensors["transformer.h.0.attn.c_proj.weight"]
    np.testing.assert_array_equal(weight[4:8], params["blocks"]["attn"]["out"]["kernel"][0, 1])


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
    assert canonical(stored) == known


def test_attention_without_scaling_is_refused():
    with pytest.raises(UserError, match="scale_attn_weights false"):
        from_hf_config({"model_type": "gpt2", "scale_attn_weights": False})


def test_an_empty_config_is_the_124m_model_with_its_dropouts():
    config = Gpt2Config(**from_hf_config({"model_type": "gpt2"}))
    assert config == Gpt2Config(embed_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)


def test_the_config_has_the_same_sizes():
    config = Gpt2Config(**CONFIG.model_dump() | {"resid_pdrop": 0.1, "upcast_attn": True, "layer_norm_epsilon": 1e-6})
    hf = to_hf_config(config, 20, eos_id=19, bos_id=None)
    assert (hf["vocab_size"], hf["n_positions"], hf["n_embd"], hf["n_layer"], hf["n_head"]) == (20, 8, 12, 2, 3)
    assert (hf["n_inner"], hf["resid_pdrop"], hf["layer_norm_epsilon"]) == (24, 0.1, 1e-6)
    assert (hf["activation_function"], hf["tie_word_embeddings"], hf["reorder_and_upcast_attn"]) == (
        "gelu_new",
        True,
        True,
    )
    assert (hf["eos_token_id"], hf["bos_token_id"]) == (19, None)
