"""Bytes of tokens: those of a text's tokens add up to the text's, for each kind of tokenizer that has text."""

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES
from tokenizers import decoders, models, pre_tokenizers

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.sentencepiece import convert_sentencepiece
from lmtrain.hf.token_bytes import token_bytes
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.documents import DocumentReader

TEXTS = [text for _, text in DocumentReader(VALIDATION_FILES[0], "text")][:20]
HARD = ["ünï ☃ 🙂", "a  b\t\r\n", " lead", "trail ", "日本語", "", "\x00\x7f", "e\u0301", "<0x0A> is <0x41>", "a b c"]


def of(library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer("test", library, library.get_vocab_size(with_added_tokens=True), None, None, "test")


def summed(tokenizer: Tokenizer, text: str) -> int:
    lengths = token_bytes(tokenizer)
    return sum(lengths[number] for number in tokenizer.backend.encode(text, add_special_tokens=False).ids)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", [str(TOKENIZER), "byte"], ids=["bpe", "byte"])
def test_byte_level_tokens_add_up_to_the_text(name):
    tokenizer = open_tokenizer(name)
    for text in TEXTS + HARD:
        assert summed(tokenizer, text) == len(text.encode()), text


@pytest.mark.parametrize("name", [str(TOKENIZER), "byte"], ids=["bpe", "byte"])
def test_each_id_has_a_length_and_special_tokens_none(name):
    tokenizer = open_tokenizer(name)
    lengths = token_bytes(tokenizer)
    assert len(lengths) == tokenizer.vocab_size
    assert {type(length) for length in lengths} == {int}
    assert lengths[tokenizer.eos_id] == 0
    assert [number for number, length in enumerate(lengths) if length == 0] == [tokenizer.eos_id]


def test_every_token_of_the_byte_tokenizer_is_one_byte():
    assert token_bytes(open_tokenizer("byte")) == [1] * 256 + [0]


def test_added_tokens_are_as_long_as_their_text_unless_they_are_special():
    """Their text is written as it is, not in the letters that stand for bytes."""
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    before = library.get_vocab_size()
    library.add_tokens(["☃☃"])
    library.add_special_tokens(["<|user|>"])
    assert token_bytes(of(library))[before:] == [len("☃☃".encode()), 0]
    assert summed(of(library), "a ☃☃ b") == len("a ☃☃ b".encode())
    assert summed(of(library), "a<|user|>b") == 2


def sentencepiece_model(**options) -> bytes:
    model = io.BytesIO()
    sentences = [line for _, text in DocumentReader(TRAIN_FILES[0], "text") for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        **{
            "vocab_size": 400,
            "hard_vocab_limit": False,
            "byte_fallback": True,
            "minloglevel": 2,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
        }
        | options,
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def converted(request, kind):
    """A sentencepiece tokenizer, and the bytes that it puts before each text."""
    content = sentencepiece_model(model_type=kind, add_dummy_prefix=request.param)
    return of(convert_sentencepiece(content, "x.model")[0]), int(request.param)


def test_sentencepiece_tokens_add_up_to_the_text_and_its_prefix_space(converted):
    tokenizer, prefix = converted
    for text in TEXTS + HARD:
        expected = len(text.encode()) + prefix if text else 0
        assert summed(tokenizer, text) == expected, text


def test_sentencepieces_bytes_are_one_long_spaces_too_and_control_pieces_none(converted):
    tokenizer, _ = converted
    lengths, vocabulary = token_bytes(tokenizer), tokenizer.backend.get_vocab()
    assert len(lengths) == tokenizer.vocab_size
    assert {lengths[vocabulary[f"<0x{byte:02X}>"]] for byte in range(256)} == {1}
    assert lengths[vocabulary["▁"]] == 1
    assert [lengths[vocabulary[name]] for name in ("<s>", "</s>")] == [0, 0]


def test_sentencepieces_unknown_piece_has_no_bytes_of_its_own():
    """It stands for any text, and for none that is spelled `<unk>`."""
    library, _, _ = convert_sentencepiece(sentencepiece_model(model_type="bpe", byte_fallback=False), "x.model")
    assert library.encode("☃", add_special_tokens=False).tokens == ["▁", "<unk>"]
    assert token_bytes(of(library))[library.token_to_id("<unk>")] == 0


@pytest.mark.parametrize("decoder", ["metaspace", "replace"])
def test_the_sign_for_the_space_tells_sentencepiece(decoder):
    """As folders from the hub have it, with a Metaspace or a Replace and no byte fallback."""
    words = {"<unk>": 0, "▁the": 1, "▁ünï": 2, "s": 3, "▁": 4}
    library = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace() if decoder == "metaspace" else decoders.Replace("▁", " ")
    library.add_special_tokens(["<unk>"])
    assert token_bytes(of(library)) == [0, 4, 6, 1, 1]


def test_without_text_there_are_none():
    assert token_bytes(open_tokenizer("passthrough", 100)) is None


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None])
def test_of_other_kinds_nothing_is_known(decoder):
    """What is between words is in none of their tokens."""
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        library.decoder = decoder
    assert token_bytes(of(library)) is None


def test_lengths_fit_the_array_that_the_step_makes_of_them():
    lengths = np.asarray(token_bytes(open_tokenizer(str(TOKENIZER))))
    assert lengths.dtype.kind == "i"
    assert lengths.max() < 1000
