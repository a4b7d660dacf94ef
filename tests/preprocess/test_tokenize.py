"""Tokenization of documents."""

import numpy as np
import pytest
import tokenizers

from lmtrain.config.errors import UserError
from lmtrain.hf.learn_tokenizer import learn_bpe
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.document_settings import DocumentSettings, check_special_tokens, token_dtype
from lmtrain.preprocess.tokenize import tokenize_batch

TEXTS = ["The quiet river.", "", "naïve 🙂\x00\n", "literal <|endoftext|> inside", " " * 50, "a" * 5000]


@pytest.fixture
def folder(settings):
    return settings["data"]["tokenizer"]


@pytest.mark.parametrize(("eos", "bos"), [(True, False), (False, True), (True, True), (False, False)])
def test_tokens_are_those_of_the_tokenizers_library_plus_special_ids(folder, eos, bos):
    tokenizer = load_tokenizer(folder)
    tokens, lengths = tokenize_batch(TEXTS, tokenizer, DocumentSettings("text", eos, bos))
    plain = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    end = plain.token_to_id("<|endoftext|>")
    documents = [[end] * bos + plain.encode(text, add_special_tokens=False).ids + [end] * eos for text in TEXTS]
    assert tokens.tolist() == sum(documents, [])
    assert lengths.tolist() == [len(document) for document in documents]


def test_bos_and_eos_are_different_ids_if_the_tokenizer_has_both(tmp_path):
    backend = learn_bpe(["some text"], 260)
    backend.add_special_tokens(["<s>"])
    save_tokenizer(backend, str(tmp_path), eos="<|endoftext|>", bos="<s>")
    tokenizer = load_tokenizer(str(tmp_path))
    tokens, _ = tokenize_batch(["x"], tokenizer, DocumentSettings("text", True, True))
    ids = [backend.token_to_id(token) for token in ("<s>", "x", "<|endoftext|>")]
    assert tokens.tolist() == ids
    assert len(set(ids)) == 3


def test_special_tokens_do_not_depend_on_the_tokenizers_own_template(tmp_path):
    backend = learn_bpe(["some text"], 260)
    end = "<|endoftext|>"
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, 0)]
    )
    save_tokenizer(backend, str(tmp_path), eos=end)
    tokens, _ = tokenize_batch(["x"], load_tokenizer(str(tmp_path)), DocumentSettings("text", True, False))
    assert tokens.tolist() == [backend.token_to_id("x"), 0]


def test_truncation_and_padding_in_the_tokenizer_file_are_ignored(tmp_path):
    backend = learn_bpe(["some text"], 260)
    text = "a long text with many bytes"
    expected = backend.encode(text).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    save_tokenizer(backend, str(tmp_path), eos="<|endoftext|>")
    tokens, lengths = tokenize_batch([text, "x"], load_tokenizer(str(tmp_path)), DocumentSettings("text", False, False))
    assert tokens.tolist() == [*expected, backend.token_to_id("x")]
    assert lengths.tolist() == [len(expected), 1]


def test_no_documents_give_no_tokens(folder):
    tokens, lengths = tokenize_batch([], load_tokenizer(folder), DocumentSettings("text", True, True))
    assert (tokens.size, tokens.dtype.str, lengths.size) == (0, "<u2", 0)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "<u2"), (65536, "<u2"), (65537, "<u4"), (256000, "<u4")])
def test_tokens_have_two_bytes_if_they_suffice(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path):
    vocab = {f"w{i}": i for i in range(65537)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    save_tokenizer(backend, str(tmp_path), eos="w1")
    settings = DocumentSettings("text", True, False)
    tokens, _ = tokenize_batch(["w65536 w65535"], load_tokenizer(str(tmp_path)), settings)
    assert tokens.dtype == np.dtype("<u4")
    assert tokens.tolist() == [65536, 65535, 1]


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_an_enforced_token_must_exist(tmp_path, name):
    learn_bpe(["some text"], 260).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=f"no {name}_token .*data.enforce_{name}: false"):
        check_special_tokens(tokenizer, DocumentSettings("text", name == "eos", name == "bos"))
    check_special_tokens(tokenizer, DocumentSettings("text", False, False))
