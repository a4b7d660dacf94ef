"""Long documents are split only where the tokens do not change."""

import json

import pytest
from conftest import TOKENIZER, TRAIN_FILES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.documents import read_texts
from lmtrain.preprocess.tokenize import can_split, split_document, tokenize

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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab1_ \n\t'.ü\u00a0\u2003\u3000日s\x1c\u180e\u200b"), max_size=40))
def test_split_random_text_has_the_tokens_of_the_unsplit_text(text):
    backend = open_tokenizer(str(TOKENIZER)).backend
    assert ids(backend, split_document(text, 1)) == ids(backend, [text])


def test_text_without_spaces_between_words_is_not_split():
    assert split_document("x" * 100, 10) == ["x" * 100]
    assert split_document("", 10) == [""]


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
