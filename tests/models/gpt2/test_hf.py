"""The table of GPT-2's names in the Hugging Face format: complete, and exact in both directions."""

import json

import jax
import numpy as np
import pytest
from flax.linen.meta import unbox
from transformers import GPT2Config, GPT2LMHeadModel

from lmtrain.hf.key_map import flatten, from_hf, to_hf
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import TABLE, to_hf_config
from lmtrain.models.gpt2.model import Gpt2LM

CONFIG = Gpt2Config(seq_len=7, hidden_dim=12, num_heads=3, num_layers=2, mlp_scale=2)
VOCAB = 11


@pytest.fixture(scope="module")
def shapes():
    model = Gpt2LM(CONFIG, VOCAB)
    tokens = jax.ShapeDtypeStruct((1, 2), np.int32)
    return unbox(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])


@pytest.fixture
def params(shapes):
    """Bit patterns of every kind: random, with signed zeros, infinities and a NaN."""
    random = np.random.default_rng(0)

    def draw(leaf):
        values = random.normal(size=leaf.shape).astype(np.float32)
        values.flat[:5] = [-0.0, np.inf, -np.inf, np.nan, np.float32(1e-42)]
        return values

    return jax.tree.map(draw, shapes)


def test_the_table_covers_every_parameter_once(shapes):
    assert sorted(row.ours for row in TABLE) == sorted(flatten(shapes))


def test_names_and_shapes_are_those_of_transformers(params):
    theirs = GPT2LMHeadModel(GPT2Config(**to_hf_config(CONFIG, VOCAB, None, None))).state_dict()
    theirs.pop("lm_head.weight")  # the same tensor as wte
    ours = to_hf(TABLE, params)
    assert {n: t.shape for n, t in ours.items()} == {n: tuple(t.shape) for n, t in theirs.items()}


def test_round_trip_is_bit_exact(params, shapes):
    back = flatten(from_hf(TABLE, to_hf(TABLE, params), shapes, CONFIG.num_layers))
    there = flatten(params)
    assert back.keys() == there.keys()
    for path, array in there.items():
        assert (back[path].shape, back[path].dtype) == (array.shape, array.dtype), path
        assert back[path].tobytes() == array.tobytes(), path


def test_columns_of_the_attention_matrix_are_q_k_v_each_head_major(params):
    ours, theirs = params["blocks"]["attn"]["qkv"], to_hf(TABLE, params)
    head_dim, width = CONFIG.head_dim, CONFIG.hidden_dim
    for layer in range(2):
        matrix = theirs[f"transformer.h.{layer}.attn.c_attn.weight"]
        vector = theirs[f"transformer.h.{layer}.attn.c_attn.bias"]
        for part in range(3):
            for head in range(3):
                columns = slice(part * width + head * head_dim, part * width + (head + 1) * head_dim)
                np.testing.assert_array_equal(matrix[:, columns], ours["kernel"][layer, :, part, head])
                np.testing.assert_array_equal(vector[columns], ours["bias"][layer, part, head])


def test_a_parameter_without_a_row_is_refused(params):
    with pytest.raises(ValueError, match=r"unexpected \['blocks/attn/gate/kernel'\]"):
        to_hf(
            TABLE, params | {"blocks": params["blocks"] | {"attn": params["blocks"]["attn"] | {"gate": {"kernel": 1}}}}
        )


@pytest.mark.parametrize("name", ["transformer.wpe.weight", "transformer.h.1.ln_2.bias"])
def test_a_missing_tensor_is_refused(params, shapes, name):
    tensors = to_hf(TABLE, params)
    del tensors[name]
    with pytest.raises(ValueError, match=name):
        from_hf(TABLE, tensors, shapes, CONFIG.num_layers)


def test_a_file_of_a_deeper_model_is_refused(params, shapes):
    with pytest.raises(ValueError, match=r"unexpected \['transformer.h.1"):
        from_hf(TABLE, to_hf(TABLE, params), shapes, 1)


def test_a_tensor_of_another_shape_is_refused(params, shapes):
    tensors = to_hf(TABLE, params)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(ValueError, match="mlp"):
        from_hf(TABLE, tensors, shapes, CONFIG.num_layers)


def test_the_config_says_what_ours_does_after_a_trip_through_json():
    config = Gpt2Config(
        seq_len=7, hidden_dim=12, num_heads=3, num_layers=2, mlp_scale=2, embed_pdrop=0, resid_pdrop=0.25,
        attn_pdrop=0.5, layer_norm_epsilon=1e-3, scale_attn_by_inverse_layer_idx=True, upcast_attn=True,
    )  # fmt: skip
    hf = GPT2Config(**json.loads(json.dumps(to_hf_config(config, VOCAB, 3, None))))
    assert (hf.vocab_size, hf.n_positions, hf.n_embd, hf.n_layer, hf.n_head, hf.n_inner) == (11, 7, 12, 2, 3, 24)
    assert (hf.embd_pdrop, hf.resid_pdrop, hf.attn_pdrop, hf.layer_norm_epsilon) == (0.0, 0.25, 0.5, 1e-3)
    assert hf.scale_attn_weights is hf.scale_attn_by_inverse_layer_idx is hf.reorder_and_upcast_attn is True
    assert (hf.eos_token_id, hf.bos_token_id, hf.tie_word_embeddings) == (3, None, True)
    assert hf.activation_function == "gelu_new"
