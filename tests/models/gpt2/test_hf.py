"""The table of Hugging Face names covers every parameter, and goes there and back without changing a bit."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from lmtrain.hf.key_map import flatten, from_hf, to_hf
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import TABLE, to_hf_config
from lmtrain.models.gpt2.model import Gpt2LM

CONFIG = Gpt2Config(hidden_dim=12, num_heads=3, num_layers=2, seq_len=8, mlp_scale=2)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(Gpt2LM(CONFIG, 20).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), nn.meta.unbox(shapes)["params"])


def test_the_table_has_one_row_for_every_parameter(params):
    assert sorted(row.ours for row in TABLE) == sorted(flatten(params))


def test_there_and_back_is_bit_exact(params):
    back = from_hf(TABLE, to_hf(TABLE, params), params, CONFIG.num_layers)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for ours, other in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        assert ours.tobytes() == other.tobytes()
        assert ours.shape == other.shape


def test_the_columns_of_c_attn_are_q_then_k_then_v_each_head_by_head(params):
    tensors = to_hf(TABLE, params)
    qkv = params["blocks"]["attn"]["qkv"]
    for part in range(3):
        for head in range(3):
            columns = slice(part * 12 + head * 4, part * 12 + head * 4 + 4)
            weight = tensors["transformer.h.1.attn.c_attn.weight"][:, columns]
            np.testing.assert_array_equal(weight, qkv["kernel"][1, :, part, head])
            bias = tensors["transformer.h.1.attn.c_attn.bias"][columns]
            np.testing.assert_array_equal(bias, qkv["bias"][1, part, head])


def test_the_rows_of_c_proj_are_head_by_head(params):
    weight = to_hf(TABLE, params)["transformer.h.0.attn.c_proj.weight"]
    np.testing.assert_array_equal(weight[4:8], params["blocks"]["attn"]["out"]["kernel"][0, 1])


def test_a_missing_tensor_and_an_unexpected_one_are_errors(params):
    tensors = to_hf(TABLE, params)
    with pytest.raises(ValueError, match=r"unexpected \['lm_head.weight'\]"):
        from_hf(TABLE, tensors | {"lm_head.weight": np.zeros(1)}, params, 2)
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    with pytest.raises(ValueError, match=r"missing \['transformer.h.1.mlp.c_fc.bias'\]"):
        from_hf(TABLE, tensors, params, 2)


def test_a_parameter_without_a_row_is_an_error(params):
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        to_hf(TABLE, params | {"extra": np.zeros(1)})


def test_the_config_says_the_same_sizes():
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
