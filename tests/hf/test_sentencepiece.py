"""A sentencepiece model gives the same ids here, in the sentencepiece library, and in transformers after export."""

import io

import pytest
import sentencepiece
from conftest import TRAIN_FILES, VALIDATION_FILES

from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.sentencepiece import convert_sentencepiece
from lmtrain.preprocess.documents import DocumentReader

TEXTS = [text for file in VALIDATION_FILES for _, text in DocumentReader(file, "text")]
HARD = [
    "Hello  world",
    " lead",
    "trail ",
    "ünï ☃\n\nx",
    "ﬁne ½ \uff46\uff55\uff4c\uff4c",
    "日本語",
    "tab\there",
    "",
    "  ",
    "a▁b",
    "e\u0301",
    "🙂",
]
LINES = [line for text in TEXTS for line in text.splitlines()] + HARD


def train(**options) -> bytes:
    """A model of 400 pieces learned from the test corpus."""
    model = io.BytesIO()
    sentences = [line for _, text in DocumentReader(TRAIN_FILES[0], "text") for line in text.splitlines() if line]
    defaults = {"vocab_size": 400, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **defaults | options
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram"},
        {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"model_type": "unigram", "add_dummy_prefix": False},
        {"model_type": "bpe", "byte_fallback": False},
    ],
    ids=str,
)
def test_ids_and_texts_are_those_of_the_sentencepiece_library(options):
    content = train(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours, eos, bos = convert_sentencepiece(content, "x.model")
    assert ours.get_vocab_size() == theirs.vocab_size()
    assert (ours.token_to_id(eos), ours.token_to_id(bos)) == (theirs.eos_id(), theirs.bos_id())
    for line in LINES:
        ids = ours.encode(line, add_special_tokens=False).ids
        assert ids == theirs.encode(line), line
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


def test_a_model_file_is_a_tokenizer_that_transformers_loads_with_equal_ids(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my.model").write_bytes(train(model_type="bpe"))
    ours = open_tokenizer(str(tmp_path / "my.model"))
    theirs = AutoTokenizer.from_pretrained(ours.path)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
    for line in LINES:
        ids = ours.backend.encode(line, add_special_tokens=False).ids
        assert theirs(line, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 50])
def test_anything_else_is_refused(content):
    with pytest.raises(UserError, match=r"tokenizer 'x\.model': not a sentencepiece model"):
        convert_sentencepiece(content, "x.model")
