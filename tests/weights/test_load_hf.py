"""Parameters from Hugging Face tensors: mismatches are named, resizing is logged."""

import numpy as np
import pytest
from weights.hf_files import (
    GPT2,
    HEAD,
    LENGTH,
    LLAMA,
    SIZES,
    VOCAB,
    WPE,
    WTE,
    assert_same,
    load,
    random_params,
    tensors_of,
)

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import flatten
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_tensor_is_loaded_into_its_place_and_nothing_is_logged(folder, logged, config):
    assert_same(load(folder(tensors_of(config)), config), flatten(random_params(config)))
    assert logged() == []


# mismatches


def test_missing_unexpected_and_misshapen_tensors_are_each_named_in_one_error(folder):
    tensors = tensors_of(GPT2)
    del tensors["transformer.h.1.ln_2.bias"], tensors["transformer.ln_f.weight"]
    tensors["transformer.h.2.ln_1.bias"] = np.zeros(8, np.float32)
    tensors["transformer.h.0.mlp.c_fc.weight"] = np.zeros((8, 31), np.float32)
    tensors["transformer.h.0.attn.c_proj.bias"] = np.zeros((8, 1), np.float32)
    ref = folder(tensors)
    with pytest.raises(UserError) as error:
        load(ref, GPT2)
    first, *lines = str(error.value).splitlines()
    assert first == f"{ref}: its weights do not match this model"
    assert sorted(lines) == [
        "  missing transformer.h.1.ln_2.bias",
        "  missing transformer.ln_f.weight",
        "  transformer.h.0.attn.c_proj.bias is [8, 1], expected [8]",
        "  transformer.h.0.mlp.c_fc.weight is [8, 31], expected [8, 32]",
        "  unexpected transformer.h.2.ln_1.bias",
    ]


def test_of_many_mismatches_the_first_are_named_and_the_rest_counted(folder):
    """The file has fewer tensors than the model, all with unknown names."""
    few = {f"layer.{number}": np.zeros(1, np.float32) for number in range(3)}
    with pytest.raises(UserError) as error:
        load(folder(few), GPT2)
    lines = str(error.value).splitlines()
    assert lines[1] == "  missing transformer.wte.weight"
    assert len(lines) == 7
    assert lines[-1] == f"  and {len(tensors_of(GPT2)) + 3 - 5} more"


def test_another_width_is_an_error_also_for_tensors_that_are_resized(folder):
    tensors = tensors_of(GPT2) | {WTE: np.zeros((VOCAB, 6), np.float32), WPE: np.zeros((LENGTH, 9), np.float32)}
    with pytest.raises(UserError) as error:
        load(folder(tensors), GPT2)
    assert f"{WTE} is [{VOCAB}, 6], expected [{VOCAB}, 8]" in str(error.value)
    assert f"{WPE} is [{LENGTH}, 9], expected [{LENGTH}, 8]" in str(error.value)


@pytest.mark.parametrize("shape", [(), (VOCAB,), (VOCAB, 8, 1)])
def test_embeddings_of_another_rank_are_refused(folder, shape):
    for name in (WTE, WPE):
        with pytest.raises(UserError, match=rf"{name} is \["):
            load(folder(tensors_of(GPT2) | {name: np.zeros(shape, np.float32)}), GPT2)


# a tied head


@pytest.mark.parametrize("change", [None, "one number", "one row less"])
def test_a_stored_head_has_to_equal_the_embedding(folder, change):
    tensors = tensors_of(GPT2)
    head = tensors[WTE].copy()
    if change == "one number":
        head[3, 2] += 1e-6
    elif change == "one row less":
        head = head[:-1]
    ref = folder(tensors | {HEAD: head})
    if change is None:
        assert_same(load(ref, GPT2), flatten(random_params(GPT2)))
        resized = load(ref, GPT2, vocab=7)
        np.testing.assert_array_equal(resized["tokens/embedding"][:7], tensors[WTE][:7])
        assert not resized["tokens/embedding"][7:].any()
        return
    with pytest.raises(UserError) as error:
        load(ref, GPT2)
    assert str(error.value).startswith(f"{ref}: {HEAD} differs from {WTE}, ")


def test_an_untied_model_requires_its_head(folder):
    untied = Gpt2Config(**SIZES, tie_word_embeddings=False)
    assert_same(load(folder(tensors_of(untied)), untied), flatten(random_params(untied)))
    with pytest.raises(UserError, match=f"missing {HEAD}"):
        load(folder(tensors_of(GPT2)), untied)


# resizing


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    ("vocab", "what"),
    [
        (7, "the first 7 of 10 rows are used, to fit the tokenizer"),
        (13, "3 rows are added to 10, each the mean of the existing rows, to fit the tokenizer"),
    ],
)
def test_embeddings_are_resized_to_the_vocabulary_and_new_ones_are_the_mean(folder, logged, multiple, vocab, what):
    config = LlamaConfig(**SIZES, intermediate_dim=12, pad_vocab_to_multiple_of=multiple)
    tensors = tensors_of(config)
    ref = folder(tensors)
    params = load(ref, config, vocab=vocab)
    for path, name in (("tokens/embedding", "model.embed_tokens.weight"), ("unembed/embedding", HEAD)):
        assert len(params[path]) == (vocab if multiple == 1 else -(-vocab // 8) * 8)
        kept = min(vocab, 10)
        np.testing.assert_array_equal(params[path][:kept], tensors[name][:kept])
        for row in params[path][kept:vocab]:
            np.testing.assert_allclose(row, tensors[name].mean(0), rtol=1e-6)
        assert not params[path][vocab:].any()
    assert logged() == [f"{ref}: {name}: {what}" for name in ("model.embed_tokens.weight", HEAD)]


def test_positions_are_cut_and_never_added(folder, logged):
    tensors = tensors_of(GPT2)
    ref = folder(tensors)
    found = load(ref, Gpt2Config(**SIZES | {"seq_len": 5}))
    np.testing.assert_array_equal(found["positions/embedding"], tensors[WPE][:5])
    assert logged() == [f"{ref}: {WPE}: the first 5 of 12 rows are used, to fit model.seq_len"]
    with pytest.raises(UserError, match=rf"{WPE} is \[12, 8\], expected \[20, 8\]"):
        load(ref, Gpt2Config(**SIZES | {"seq_len": 20}))
