"""Bytes per token: they add up to the size of the text, for each supported kind of tokenizer."""

import dataclasses

import numpy as np
import pytest
import tokenizers
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES
from sentencepiece_texts import train
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.sentencepiece import convert_sentencepiece
from lmtrain.hf.tokenizer import Tokenizer, text_sizes, token_bytes
from lmtrain.preprocess.documents import read_texts

TEXTS = list(read_texts(VALIDATION_FILES[0], "text"))[:20]
HARD = ["ünï ☃ 🙂", "a  b\t\r\n", " lead", "trail ", "日本語", "", "\x00\x7f", "e\u0301", "<0x0A> is <0x41>", "a b c"]


def of(library: tokenizers.Tokenizer) -> Tokenizer:
    size = library.get_vocab_size(with_added_tokens=True)
    return Tokenizer(path="test", library=library, vocab_size=size, eos_id=None, bos_id=None, fingerprint="test")


def summed(tokenizer: Tokenizer, text: str) -> int:
    lengths = token_bytes(tokenizer)
    return sum(lengths[number] for number in tokenizer.backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", [str(TOKENIZER), "byte"], ids=["bpe", "byte"])
def test_byte_level_tokens_add_up_to_the_text_and_all_but_special_ones_have_a_length(name):
    tokenizer = open_tokenizer(name)
    for text in TEXTS + HARD:
        assert summed(tokenizer, text) == len(text.encode()), text
    lengths = token_bytes(tokenizer)
    assert len(lengths) == tokenizer.vocab_size
    assert {type(length) for length in lengths} == {int}
    assert [number for number, length in enumerate(lengths) if length == 0] == [tokenizer.eos_id]
    assert np.asarray(lengths).max() < 1000  # fits the array of the step
    if name == "byte":
        assert lengths == [1] * 256 + [0]


def test_added_tokens_have_the_length_of_their_text_unless_special():
    """Their text is stored literally, not in the letters that represent bytes."""
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    before = library.get_vocab_size()
    library.add_tokens(["☃☃"])
    library.add_special_tokens(["<|user|>"])
    assert token_bytes(of(library))[before:] == [len("☃☃".encode()), 0]
    assert summed(of(library), "a ☃☃ b") == len("a ☃☃ b".encode())
    assert summed(of(library), "a<|user|>b") == 2


def converted_model(**options) -> Tokenizer:
    options |= {"vocab_size": 400, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    words = [word for text in read_texts(TRAIN_FILES[0], "text") for word in text.split()]
    return of(convert_sentencepiece(train(words, **options), "x.model")[0])


@pytest.mark.parametrize(("kind", "prefix"), [("bpe", True), ("unigram", False)])
def test_sentencepiece_tokens_add_up_to_the_text_and_its_prefix_space(kind, prefix):
    tokenizer = converted_model(model_type=kind, add_dummy_prefix=prefix, byte_fallback=True)
    for text in TEXTS + HARD:
        assert summed(tokenizer, text) == (len(text.encode()) + prefix if text else 0), text
    lengths, vocabulary = token_bytes(tokenizer), tokenizer.backend.get_vocab()
    assert len(lengths) == tokenizer.vocab_size
    assert {lengths[vocabulary[f"<0x{byte:02X}>"]] for byte in range(256)} == {1}
    assert [lengths[vocabulary[name]] for name in ("▁", "<s>", "</s>")] == [1, 0, 0]


def document_bytes(tokenizer: Tokenizer, text: str) -> int:
    """The bytes of a document, as evaluation counts them."""
    sizes, ids = text_sizes(tokenizer), tokenizer.backend.encode(text, add_special_tokens=False).ids
    first = sizes.first or sizes.sizes
    return sum((sizes.sizes if index else first)[number] for index, number in enumerate(ids))


def metaspace(scheme: str) -> Tokenizer:
    """As LlamaTokenizer of transformers has it, with bytes for what is not in the vocabulary."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"xeads", "▁a"]
    library = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return of(library)


def legacy_llama() -> Tokenizer:
    tokenizer = metaspace("never")
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def byte_level(prefix: bool) -> Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return of(library)


KINDS = {
    "byte-level": lambda: byte_level(False),
    "byte-level, prefix": lambda: byte_level(True),
    "unigram, prefix": lambda: converted_model(model_type="unigram", byte_fallback=True),
    "bpe, suffix": lambda: converted_model(model_type="bpe", byte_fallback=True, treat_whitespace_as_suffix=True),
    "bpe": lambda: converted_model(model_type="bpe", byte_fallback=True, add_dummy_prefix=False),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
    "Llama": legacy_llama,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_bytes_of_a_document_are_those_of_its_own_text(make):
    tokenizer = make()
    # these add no space before one, and have the same tokens without it
    loses_space = tokenizer.backend.encode(" x").ids == tokenizer.backend.encode("x").ids
    for text in TEXTS + HARD:
        lost = loses_space and text[:1].isspace()
        assert document_bytes(tokenizer, text) == len(text.encode()) - lost, text


def test_after_a_special_token_within_a_text_a_space_is_added_only_by_some():
    assert text_sizes(byte_level(False)).first is None
    assert text_sizes(legacy_llama()).after == text_sizes(metaspace("always")).after == (0, 1, 2)
    assert text_sizes(metaspace("first")).after == ()
    assert text_sizes(dataclasses.replace(metaspace("first"), eos_id=2, bos_id=1)).after == (1, 2)


def test_bytes_are_those_of_the_normalized_text_and_none_for_the_unknown_piece():
    """It represents arbitrary text, not the text `<unk>`."""
    tokenizer = byte_level(True)
    tokenizer.backend.normalizer = normalizers.NFKC()
    assert document_bytes(tokenizer, "ﬁ") == len("fi")
    tokenizer = converted_model(model_type="bpe", byte_fallback=False)
    assert tokenizer.backend.encode("☃", add_special_tokens=False).tokens == ["▁", "<unk>"]
    assert token_bytes(tokenizer)[tokenizer.backend.token_to_id("<unk>")] == 0


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Replace("▁", " ")])
def test_the_space_sign_identifies_sentencepiece(decoder):
    """As in folders from the Hub, with a Metaspace or a Replace decoder and no byte fallback."""
    words = {"<unk>": 0, "▁the": 1, "▁ünï": 2, "s": 3, "▁": 4}
    library = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoder
    library.add_special_tokens(["<unk>"])
    assert token_bytes(of(library)) == [0, 4, 6, 1, 1]


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_other_kinds_of_tokenizers_have_no_token_bytes(decoder):
    """Their tokens do not contain the spaces between words."""
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        library.decoder = decoder
    assert token_bytes(of(library)) is token_bytes(open_tokenizer("passthrough", 100)) is None
