"""Sentencepiece models give the same ids here, in their library, and in transformers after export; their training."""

import numpy as np
import pytest
import sentencepiece
from conftest import TRAIN_FILES, VALIDATION_FILES
from sentencepiece_texts import CONTROL, HTML, PLAIN, RULES, SYMBOLS, check_ids, parsed, random_texts, train
from tokenizers import Tokenizer

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.key_map import Piece, Row
from lmtrain.hf.sentencepiece import convert_sentencepiece, train_sentencepiece
from lmtrain.preprocess.documents import read_texts
from lmtrain.runtime.errors import UserError
from lmtrain.weights.write_export import Export, write_export

TEXTS = [text for file in VALIDATION_FILES for text in read_texts(file, "text")]
HARD = ["Hello  world", " lead", "trail ", "ünï ☃\n\nx", "ﬁne ½ \uff46\uff55\uff4c\uff4c", "日本語", "tab\there"]
HARD += ["", "  ", "a▁b", "e\u0301", "🙂", "<unk>", "<0x0A> is <0x41>", "foo the<0x"]
NAMES = ["<unk>", "<s>", "</s>", "<0x41>", "<0x0A>", *CONTROL]
TYPED = ["the</s>rain", "</s>", "foo</s>foo", "<D>", "[INST] a [/INST]", "<0x41>", "foo<0x0A>the", "<unk><unk>"]
TYPED += ["\n</s>\n"]
LINES = [line for text in TEXTS for line in text.splitlines()] + HARD


def opened(tmp_path, content):
    """A model as a tokenizer here, in the sentencepiece library, and in transformers after an export."""
    from transformers import AutoTokenizer

    (tmp_path / "my.model").write_bytes(content)
    ours = open_tokenizer(str(tmp_path / "my.model"))
    piece = Piece(name="w", shape=(2,), rows=(Row("w", "w"),), index=None)
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
    words = [word for text in read_texts(TRAIN_FILES[0], "text") for word in text.split()]
    ours, library, theirs = opened(tmp_path, train(words, vocab_size=400, **options))
    for line in [*LINES, "the</s>rain", "½\u200dx\n"]:
        ids = ours.backend.encode(line, add_special_tokens=False).ids
        assert ids == library.encode(line) == theirs(line, add_special_tokens=False)["input_ids"], line
        if library.unk_id() not in ids:
            assert ours.backend.decode(ids) == library.decode(ids)


DOCUMENTS = [text for file in (TRAIN_FILES[0], TRAIN_FILES[2]) for text in read_texts(file, "text")]
KINDS = {"bpe": 500, "unigram": 320}


def learned(model_type: str, documents: list[str] = DOCUMENTS, lines: int = 1000, vocab_size: int = 0) -> bytes:
    return train_sentencepiece(documents, vocab_size or KINDS[model_type], model_type, lines)


def pieces(content: bytes) -> set[str]:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    return {theirs.id_to_piece(number) for number in range(theirs.vocab_size())}


@pytest.mark.parametrize("model_type", KINDS)
def test_a_trained_model_is_the_same_tokenizer_everywhere_and_restores_any_text(model_type, tmp_path):
    """Text that spells a control token stays text: HTML uses `<s>` for strikethrough. The layout is that of Llama."""
    ours, library, theirs = opened(tmp_path, learned(model_type))
    varied = [text for text in [*HARD, *TEXTS, *random_texts(1, 600, NAMES)] if "▁" not in text]  # decoded as a space
    for text in [*varied, "<s></s>", "struck <s>through</s> text", "</s>b", "<0x0A><0x0A>", "x<0x41><unk>"]:
        ids = ours.backend.encode(text, add_special_tokens=False).ids
        assert ids == library.encode(text) == theirs(text)["input_ids"], text
        assert not {0, 1, 2} & set(ids)
        assert ours.backend.decode(ids) == theirs.decode(ids) == text
    assert library.vocab_size() == KINDS[model_type]
    assert [library.id_to_piece(number) for number in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert (library.unk_id(), library.pad_id()) == (0, -1)


@pytest.mark.parametrize("model_type", KINDS)
def test_equal_texts_give_equal_models_and_lines_are_sampled_uniformly(model_type):
    assert learned(model_type) == learned(model_type)
    documents = [f"line number {number} of this text\n" * 3 for number in range(300)]
    few = [learned(model_type, documents, lines=50, vocab_size=285) for _ in range(2)]
    assert few[0] == few[1]
    assert few[0] != learned(model_type, documents, vocab_size=285)


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


def test_each_digit_is_a_separate_piece_and_indentation_gives_pieces():
    found = pieces(learned("bpe", [*DOCUMENTS, "in 2026 and 2027 " * 500]))
    assert not [piece for piece in found if len(piece) > 1 and piece[0] != "<" and any(map(str.isdigit, piece))]
    documents = [f"def f():\n{' ' * depth}return\n" * 20 for depth in (4, 8, 12)]
    assert {"▁" * 2, "▁" * 4} <= pieces(learned("bpe", documents, vocab_size=280))


@pytest.mark.parametrize("model_type", KINDS)
def test_an_unsuitable_vocab_size_is_an_error_with_the_limit(model_type):
    with pytest.raises(UserError, match=r"^vocab_size 9999: .* \d+ pieces$") as e:
        learned(model_type, vocab_size=9999)
    most = int(str(e.value).split()[-2])
    assert len(pieces(learned(model_type, vocab_size=most))) == most
    with pytest.raises(UserError, match=r"^vocab_size 261: .* \d+$") as e:
        learned(model_type, vocab_size=261)
    least = int(str(e.value).split()[-1])
    assert len(pieces(learned(model_type, vocab_size=least))) == least


def test_no_text_and_other_content_are_user_errors():
    with pytest.raises(UserError, match="no text"):
        learned("bpe", ["", "\n\n"])
    for content in (b"", b"not a model"):
        with pytest.raises(UserError, match=r"'x\.model'"):
            convert_sentencepiece(content, "x.model")


def converted(content: bytes) -> Tokenizer:
    return convert_sentencepiece(content, "my.model")[0]


def check(count: int, **options) -> None:
    symbols = options.get("user_defined_symbols", [])
    content = train(control_symbols=CONTROL, **options)
    check_ids(content, converted(content), [*TYPED, *symbols, *random_texts(count, count, [*NAMES, *symbols])])


@pytest.mark.parametrize(
    ("model_type", "rule"),
    [("bpe", "identity"), ("bpe", "nmt_nfkc_cf"), ("unigram", "nfkc_cf"), ("unigram", "nmt_nfkc")],
)
def test_random_texts_and_typed_names_have_the_ids_of_the_library(model_type, rule):
    """Both settings of each option, in other combinations for each model."""
    number = RULES.index(rule) + (model_type == "bpe")
    options = {"model_type": model_type, "normalization_rule_name": rule}
    plain = {"byte_fallback": number % 2 == 0, "add_dummy_prefix": number % 4 < 2, "words": PLAIN}
    symbols = {"byte_fallback": number % 2 == 1, "treat_whitespace_as_suffix": number % 3 == 0, "words": HTML}
    check(200, **options, **plain, remove_extra_whitespaces=number % 3 > 0, user_defined_symbols=SYMBOLS)
    check(200, **options, **symbols, remove_extra_whitespaces=number % 3 == 0, user_defined_symbols=SYMBOLS)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_thousands_of_texts_have_the_ids_of_the_library_with_each_option(model_type, rule):
    """1,600 for each case, 16,000 in all, with all combinations of any three of four other options."""
    for number in (0, 3, 5, 6, 9, 10, 12, 15):
        check(
            200,
            model_type=model_type,
            normalization_rule_name=rule,
            byte_fallback=number % 3 == 0,
            add_dummy_prefix=number % 2 == 0,
            remove_extra_whitespaces=number // 2 % 2 == 0,
            treat_whitespace_as_suffix=number // 4 % 2 == 0,
            user_defined_symbols=SYMBOLS if number < 8 else [],
            words=PLAIN if number.bit_count() == 2 else HTML,
        )


def with_pieces(model_type: str, pieces: list[tuple[str, float, int]], byte_fallback: bool = False) -> bytes:
    """A model of these pieces, without changes of the text."""
    proto = parsed(train(model_type=model_type, normalization_rule_name="identity", byte_fallback=byte_fallback))
    reserved = [piece for piece in proto.pieces if piece.type not in (1, 4)]
    del proto.pieces[len(reserved) :]
    for text, score, kind in pieces:
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = text, score, kind
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    return proto.SerializeToString()


LETTERS = [(letter, -3.0 - number, 1) for number, letter in enumerate("▁abc</s>xD"[:9])]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_symbols_of_the_user_win_as_often_as_in_the_library(byte_fallback):
    """A unigram model may prefer other pieces to a symbol."""
    for score in (-1.0, -3.05, -3.95, -4.05, -8.0):
        content = with_pieces("unigram", [*LETTERS, ("ab", score, 1), ("bc", 0.0, 4)], byte_fallback)
        check_ids(content, converted(content), ["abc", "aabcc", "bcbc", "a</s>bc", "zbcz"])


@pytest.mark.parametrize(
    ("model_type", "byte_fallback", "pieces", "named"),
    [
        ("unigram", False, [*LETTERS, ("az", -1.0, 1)], "'<s>'"),
        ("unigram", True, [("a", -1.0, 1), ("q", 0.0, 3)], "'q'"),
        ("bpe", False, [*LETTERS, ("ab", -1.0, 5), ("abc", -2.0, 1)], "'ab'"),
    ],
)
def test_a_piece_that_cannot_be_represented_is_named(model_type, byte_fallback, pieces, named):
    with pytest.raises(UserError, match=rf"^tokenizer 'my\.model': .*{named}"):
        converted(with_pieces(model_type, pieces, byte_fallback))
