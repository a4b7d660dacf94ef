"""Bytes per token: they add up to the size of the text, for each supported kind of tokenizer."""

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
def test_each_id_has_a_length_except_special_tokens(name):
    tokenizer = open_tokenizer(name)
    lengths = token_bytes(tokenizer)
    assert len(lengths) == tokenizer.vocab_size
    assert {type(length) for length in lengths} == {int}
    assert lengths[tokenizer.eos_id] == 0
    assert [number for number, length in enumerate(lengths) if length == 0] == [tokenizer.eos_id]


def test_every_token_of_the_byte_tokenizer_is_one_byte():
    assert token_bytes(open_tokenizer("byte")) == [1] * 256 + [0]


def test_added_tokens_have_the_length_of_their_text_unless_special():
    """Their text is stored literally, not in the letters that represent bytes."""
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
    """A sentencepiece tokenizer, and the number of bytes that it adds before each text."""
    content = sentencepiece_model(model_type=kind, add_dummy_prefix=request.param)
    return of(convert_sentencepiece(content, "x.model")[0]), int(request.param)


def test_sentencepiece_tokens_add_up_to_the_text_and_its_prefix_space(converted):
    tokenizer, prefix = converted
    for text in TEXTS + HARD:
        expected = len(text.encode()) + prefix if text else 0
        assert summed(tokenizer, text) == expected, text


def test_sentencepiece_bytes_and_spaces_count_one_and_control_pieces_zero(converted):
    tokenizer, _ = converted
    lengths, vocabulary = token_bytes(tokenizer), tokenizer.backend.get_vocab()
    assert len(lengths) == tokenizer.vocab_size
    assert {lengths[vocabulary[f"<0x{byte:02X}>"]] for byte in range(256)} == {1}
    assert lengths[vocabulary["▁"]] == 1
    assert [lengths[vocabulary[name]] for name in ("<s>", "</s>")] == [0, 0]


def test_the_unknown_piece_of_sentencepiece_has_no_bytes():
    """It represents arbitrary text, not the text `<unk>`."""
    library, _, _ = convert_sentencepiece(sentencepiece_model(model_type="bpe", byte_fallback=False), "x.model")
    assert library.encode("☃", add_special_tokens=False).tokens == ["▁", "<unk>"]
    assert token_bytes(of(library))[library.token_to_id("<unk>")] == 0


@pytest.mark.parametrize("decoder", ["metaspace", "replace"])
def test_the_space_sign_identifies_sentencepiece(decoder):
    """As in folders from the Hub, with a Metaspace or a Replace decoder and no byte fallback."""
    words = {"<unk>": 0, "▁the": 1, "▁ünï": 2, "s": 3, "▁": 4}
    library = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace() if decoder == "metaspace" else decoders.Replace("▁", " ")
    library.add_special_tokens(["<unk>"])
    assert token_bytes(of(library)) == [0, 4, 6, 1, 1]


def test_passthrough_has_no_token_bytes():
    assert token_bytes(open_tokenizer("passthrough", 100)) is None


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None])
def test_other_kinds_of_tokenizers_have_no_token_bytes(decoder):
    """Their tokens do not contain the spaces between words."""
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        library.decoder = decoder
    assert token_bytes(of(library)) is None


def test_lengths_fit_the_array_of_the_step():
    lengths = np.asarray(token_bytes(open_tokenizer(str(TOKENIZER))))
    assert lengths.dtype.kind == "i"
    assert lengths.max() < 1000
