"""Sentencepiece models give the same ids in lmtrain, in the sentencepiece library, and in transformers after export.

Training: any text can be decoded exactly, equal texts give equal models, and no text is left out.
"""

import random

import numpy as np
import pytest
import sentencepiece
from conftest import TRAIN_FILES, VALIDATION_FILES
from sentencepiece_texts import train

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.key_map import Piece, Row
from lmtrain.hf.sentencepiece import convert_sentencepiece, train_sentencepiece
from lmtrain.preprocess.documents import read_texts
from lmtrain.runtime.errors import UserError
from lmtrain.weights.write_export import Export, write_export

TEXTS = [text for file in VALIDATION_FILES for text in read_texts(file, "text")]
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
    "<unk>",
    "<0x0A> is <0x41>",
    "foo the<0x",
]
LINES = [line for text in TEXTS for line in text.splitlines()] + HARD


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(tmp_path, content):
    """A model as a tokenizer here, in the sentencepiece library, and in transformers after an export."""
    from transformers import AutoTokenizer

    (tmp_path / "my.model").write_bytes(content)
    ours = open_tokenizer(str(tmp_path / "my.model"))
    piece = Piece(name="w", shape=(2,), row=Row("w", "w"), index=None)
    export = Export(pieces=[piece], config={"model_type": "llama"}, extra_files={}, tokenizer=ours, dtype="float32")
    write_export(str(tmp_path / "hf"), export, [np.zeros(2, np.float32)])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id) == (2, 1)
    assert library.vocab_size() == ours.vocab_size == len(theirs)
    return ours, library, theirs


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "byte_fallback": True},
        {"model_type": "unigram", "user_defined_symbols": ["foo", "\n"]},
        {"model_type": "bpe", "user_defined_symbols": ["foo", "the"], "add_dummy_prefix": False},
    ],
    ids=str,
)
def test_a_model_of_others_has_the_ids_of_the_library_here_and_in_transformers(options, tmp_path):
    """On source code; tests/hf/test_sentencepiece_model.py compares more models on random texts."""
    words = [word for text in read_texts(TRAIN_FILES[0], "text") for word in text.split()]
    ours, library, theirs = opened(tmp_path, train(words, vocab_size=400, **options))
    for line in [*LINES, "the</s>rain", "½\u200dx\n"]:
        ids = ours.backend.encode(line, add_special_tokens=False).ids
        assert ids == library.encode(line) == theirs(line, add_special_tokens=False)["input_ids"], line
        if library.unk_id() not in ids:
            assert ours.backend.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 50])
def test_other_content_is_refused(content):
    with pytest.raises(UserError, match=r"tokenizer 'x\.model': not a sentencepiece model"):
        convert_sentencepiece(content, "x.model")


def varied_texts() -> list[str]:
    """Several hundred texts: scripts, spaces, line ends, control characters, digits, and text that resembles pieces.

    Without the sign that sentencepiece uses for a space, which its models do not restore.
    """
    chance = random.Random(0)
    alphabets = ["ab \n", " \t\r\n", "0123456789.,- ", "<0x1Aunk> ", "def(x):\n    return", "аб漢字にほ한국العر ñéü"]
    ranges = [(0x20, 0x7F), (0, 0x100), (0x300, 0x370), (0x2500, 0x2580), (0x4E00, 0x4F00), (0x1F300, 0x1F700)]
    made = ["".join(chance.choices(alphabet, k=chance.randrange(60))) for alphabet in alphabets for _ in range(50)]
    made += ["".join(chr(chance.randrange(*span)) for _ in range(chance.randrange(30))) for span in ranges * 20]
    special = [
        "\0",
        "a\0b",
        "\ufeffx",
        "\ufffd",
        "▅ ▅",
        "👩‍👩‍👧‍👦 🇫🇷",
        "\U0010ffff",
        "\u2028\x85",
        "<unk>",
        "x<0x0A>y",
        " " * 50,
    ]
    return [text for text in [*HARD, *TEXTS, *special, *made] if "▁" not in text]


VARIED = varied_texts()
DOCUMENTS = [text for file in (TRAIN_FILES[0], TRAIN_FILES[2]) for text in read_texts(file, "text")]
KINDS = {"bpe": 500, "unigram": 320}


def learned(model_type: str, documents: list[str] = DOCUMENTS, lines: int = 1000, vocab_size: int = 0) -> bytes:
    return train_sentencepiece(documents, vocab_size or KINDS[model_type], model_type, lines)


@pytest.fixture(scope="module", params=KINDS)
def model(request) -> bytes:
    return learned(request.param)


def pieces(content: bytes) -> set[str]:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    return {theirs.id_to_piece(number) for number in range(theirs.vocab_size())}


def test_a_trained_model_is_the_same_tokenizer_everywhere_and_restores_any_text(model, tmp_path):
    """Text that spells a control token stays text: HTML uses `<s>` for strikethrough."""
    ours, library, theirs = opened(tmp_path, model)
    assert len(VARIED) > 400
    for text in [*VARIED, "<s></s>", "struck <s>through</s> text", "</s>b", "<0x0A><0x0A>", "x<0x41><unk>"]:
        ids = ours.backend.encode(text, add_special_tokens=False).ids
        assert ids == library.encode(text) == theirs(text)["input_ids"], text
        assert not {0, 1, 2} & set(ids)
        assert ours.backend.decode(ids) == theirs.decode(ids) == text


def test_a_trained_model_has_the_layout_of_llama(model):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert theirs.vocab_size() in KINDS.values()
    assert [theirs.id_to_piece(number) for number in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert (theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id()) == (0, 1, 2, -1)
    assert theirs.decode(theirs.encode("ﬁne  ½ ")) == "ﬁne  ½ "


@pytest.mark.parametrize("model_type", KINDS)
def test_equal_texts_give_equal_models_and_lines_are_sampled_uniformly(model_type):
    assert learned(model_type) == learned(model_type)
    documents = [f"line number {number} of this text\n" * 3 for number in range(300)]
    few = [learned(model_type, documents, lines=50, vocab_size=285) for _ in range(2)]
    assert few[0] == few[1]
    assert few[0] != learned(model_type, documents, vocab_size=285)


def test_a_sample_is_spread_over_the_entire_text():
    """Of 20 blocks with a distinct word each, nearly all are in the sample."""
    words = [f"{'abcdefghij'[number % 10] * 3}{'uv'[number // 10] * 3}" for number in range(20)]
    documents = [f"{word} " * 8 for word in words for _ in range(100)]
    found = pieces(learned("bpe", documents, lines=200, vocab_size=330))
    assert sum(f"▁{word}" in found for word in words) >= 18


@pytest.mark.parametrize(
    "document",
    [
        "common words " * 1000 + "zebra quagga " * 1000,  # one line far above the limit of sentencepiece, 4192 bytes
        "日" * 5000 + " zebra quagga" * 200,
        "zebra▅quagga zebra " * 100,
        "\n\nzebra quagga\r\n" * 100,
        "quagga zebra\0" * 100,
    ],
)
def test_no_text_is_left_out_of_training(document):
    found = {piece.strip("▁\r") for piece in pieces(learned("bpe", [*DOCUMENTS, document]))}
    assert {"zebra", "quagga"} <= found


@pytest.mark.parametrize("model_type", KINDS)
def test_each_digit_is_a_separate_piece(model_type):
    found = pieces(learned(model_type, [*DOCUMENTS, "in 2026 and 2027 " * 500]))
    assert not [piece for piece in found if len(piece) > 1 and piece[0] != "<" and any(map(str.isdigit, piece))]


def test_indentation_gives_pieces():
    documents = [f"def f():\n{' ' * depth}return\n" * 20 for depth in (4, 8, 12)]
    assert {"▁" * 2, "▁" * 4} <= pieces(learned("bpe", documents, vocab_size=280))


@pytest.mark.parametrize("model_type", KINDS)
def test_an_unsuitable_vocab_size_is_an_error_with_the_limit(model_type):
    with pytest.raises(UserError, match=r"^vocab_size 9999: too large for this text: at most \d+ pieces$") as e:
        learned(model_type, vocab_size=9999)
    most = int(str(e.value).split()[-2])
    assert len(pieces(learned(model_type, vocab_size=most))) == most
    with pytest.raises(UserError, match=r"^vocab_size 261: too small for this text: .* \d+$") as e:
        learned(model_type, vocab_size=261)
    least = int(str(e.value).split()[-1])
    assert len(pieces(learned(model_type, vocab_size=least))) == least


@pytest.mark.parametrize("documents", [[], ["", "\n\n"]])
def test_no_text_is_a_user_error(documents):
    with pytest.raises(UserError, match="no text to train on"):
        learned("bpe", documents)
