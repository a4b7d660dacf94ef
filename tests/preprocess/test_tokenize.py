"""Tokenization of documents; long ones are split only where the tokens do not change."""

import json

import hypothesis
import pytest
import tokenizers
from conftest import TOKENIZER, TRAIN_FILES
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from lmtrain.data.config import DataConfig
from lmtrain.hf.extend_tokenizer import learn_bpe
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.documents import read_texts
from lmtrain.preprocess.records import InstructionText
from lmtrain.preprocess.tokenize import can_split, split_document, tokenize

TEXTS = ["The quiet river.", "", "naïve 🙂\x00\n", "literal <|endoftext|> inside", " " * 50, "a" * 5000]


@pytest.fixture
def folder(settings):
    return settings["data"]["tokenizer"]


@pytest.mark.parametrize(("eos", "bos"), [(True, False), (False, True), (True, True), (False, False)])
def test_tokens_are_those_of_the_tokenizers_library_plus_special_ids(folder, eos, bos):
    tokenizer = load_tokenizer(folder)
    tokens, lengths, *_ = tokenize(TEXTS, tokenizer, DataConfig(enforce_eos=eos, enforce_bos=bos))
    plain = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    end = plain.token_to_id("<|endoftext|>")
    documents = [[end] * bos + plain.encode(text, add_special_tokens=False).ids + [end] * eos for text in TEXTS]
    assert tokens.tolist() == sum(documents, [])
    assert lengths.tolist() == [len(document) for document in documents]


def test_template_truncation_and_padding_in_the_tokenizer_file_are_ignored(tmp_path):
    backend = learn_bpe(["some text"], 260)
    text, end = "a long text with many bytes", "<|endoftext|>"
    expected = backend.encode(text).ids
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    save_tokenizer(backend, str(tmp_path), eos=end)
    tokens, lengths, *_ = tokenize([text, "x"], load_tokenizer(str(tmp_path)), DataConfig())
    assert tokens.tolist() == [*expected, 0, backend.token_to_id("x"), 0]
    assert lengths.tolist() == [len(expected) + 1, 2]


def test_documents_that_spell_special_tokens_and_those_that_get_a_second_one_are_counted(tmp_path):
    backend = learn_bpe(["some text"], 260)
    backend.add_special_tokens(["<s>"])
    save_tokenizer(backend, str(tmp_path), eos="<|endoftext|>", bos="<s>")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = [backend.token_to_id(token) for token in ("<s>", "x", "<|endoftext|>")]
    assert tokenize(["x"], tokenizer, DataConfig(enforce_bos=True)).tokens.tolist() == ids
    texts = ["x", "", "a<|endoftext|>", "<s>a", "<s>a<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>"]
    for more, doubled in (
        ({}, 3),
        ({"enforce_eos": False}, 0),
        ({"enforce_bos": True}, 4),
        ({"enforce_bos": True, "enforce_eos": False}, 2),
    ):
        batch = tokenize(texts, tokenizer, DataConfig(**more))
        assert (batch.spelled, batch.doubled) == (5, doubled), more
    completion = DataConfig(format={"type": "completion"})
    texts = [
        InstructionText(text=text, targets=((1, len(text)),), contents=(text,), is_plain=True)
        for text in ("ab<|endoftext|>", "ab", "ab<|eot_id|>\n", '["a", "b"]')
    ]
    batch = tokenize(texts, tokenizer, completion)
    assert (batch.doubled, batch.foreign, batch.listed) == (1, 1, 1)


def test_no_documents_give_no_tokens(folder):
    tokens, lengths, *_ = tokenize([], load_tokenizer(folder), DataConfig(enforce_bos=True))
    assert (tokens.size, tokens.dtype.str, lengths.size) == (0, "<u2", 0)


TOKENIZER_JSON = json.loads((TOKENIZER / "tokenizer.json").read_text())
TEXT = "\n".join(text for text in read_texts(TRAIN_FILES[0], "text"))


def ids(backend, texts):
    return [id for encoding in backend.encode_batch(texts, add_special_tokens=False) for id in encoding.ids]


@pytest.mark.parametrize("piece", [1, 10, 1000])
def test_split_real_text_has_the_tokens_of_the_unsplit_text(piece):
    backend = open_tokenizer(str(TOKENIZER)).backend
    pieces = split_document(TEXT, piece)
    assert len(pieces) > len(TEXT) / piece / 20
    assert "".join(pieces) == TEXT
    assert ids(backend, pieces) == ids(backend, [TEXT])
    assert [split_document(text, piece) for text in ("x" * 10**4, "")] == [["x" * 10**4], [""]]


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab1_ \n\t'.ü\u00a0\u2003\u3000日s\x1c\u180e\u200b"), max_size=40))
def test_split_random_text_has_the_tokens_of_the_unsplit_text(text):
    backend = open_tokenizer(str(TOKENIZER)).backend
    assert ids(backend, split_document(text, 1)) == ids(backend, [text])


def test_tokenizers_that_may_depend_on_text_across_a_split_are_refused():
    def changed(**parts):
        backend = Tokenizer.from_str(json.dumps(TOKENIZER_JSON))
        for name, part in parts.items():
            setattr(backend, name, part)
        return backend

    assert can_split(changed())
    assert can_split(open_tokenizer("byte").backend)
    assert not can_split(changed(normalizer=normalizers.NFC()))
    assert not can_split(changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not can_split(changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)))
    assert not can_split(changed(pre_tokenizer=pre_tokenizers.Whitespace()))
    with_space = changed()
    with_space.add_special_tokens(["<a b>"])
    assert not can_split(with_space)


def test_splitting_a_long_document_does_not_change_its_batch(monkeypatch):
    tokenizer = open_tokenizer(str(TOKENIZER))
    documents = DataConfig(enforce_bos=True)
    texts = ["short", TEXT * 20, "", "end"]
    assert len(split_document(texts[1])) > 1
    whole, split = (tokenize(texts, tokenizer, documents, split_long) for split_long in (False, True))
    assert whole.tokens.tobytes() == split.tokens.tobytes()
    assert whole.lengths.tobytes() == split.lengths.tobytes()
