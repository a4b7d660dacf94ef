"""The models of sentencepiece give the ids of the library, in particular for text that spells names of pieces."""

import pytest
from sentencepiece_texts import CONTROL, HTML, PLAIN, RULES, SYMBOLS, check_ids, parsed, random_texts, train
from tokenizers import Tokenizer

from lmtrain.hf.sentencepiece import convert_sentencepiece
from lmtrain.runtime.errors import UserError

NAMES = ["<unk>", "<s>", "</s>", "<0x41>", "<0x0A>", *CONTROL]
TYPED = [
    "the</s>rain",
    "</s>",
    "foo</s>foo",
    "<D>",
    "[INST] a [/INST]",
    "<0x41>",
    "foo<0x0A>the",
    "<unk><unk>",
    "\n</s>\n",
]


def converted(content: bytes) -> Tokenizer:
    return convert_sentencepiece(content, "my.model")[0]


def check(count: int, **options) -> None:
    symbols = options.get("user_defined_symbols", [])
    content = train(control_symbols=CONTROL, **options)
    check_ids(content, converted(content), [*TYPED, *symbols, *random_texts(count, count, [*NAMES, *symbols])])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
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
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_thousands_of_texts_have_the_ids_of_the_library_with_each_option(model_type, byte_fallback, rule):
    """5,000 for each case, 100,000 in all, with all combinations of the other options."""
    options = {"model_type": model_type, "byte_fallback": byte_fallback, "normalization_rule_name": rule}
    for symbols in ([], SYMBOLS):
        for number in range(16):
            check(
                160,
                **options,
                add_dummy_prefix=number % 2 == 0,
                remove_extra_whitespaces=number // 2 % 2 == 0,
                treat_whitespace_as_suffix=number // 4 % 2 == 0,
                user_defined_symbols=symbols,
                words=PLAIN if number < 8 else HTML,
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
    ("model_type", "byte_fallback", "pieces", "reason"),
    [
        ("unigram", False, [*LETTERS, ("az", -1.0, 1)], "a text could spell the reserved piece '<s>'"),
        ("unigram", True, [("a", -1.0, 1), ("q", 0.0, 3)], "a text could spell the reserved piece 'q'"),
        ("bpe", False, [*LETTERS, ("ab", -1.0, 5), ("abc", -2.0, 1)], "its piece 'ab' is unused"),
    ],
)
def test_what_cannot_be_represented_is_refused(model_type, byte_fallback, pieces, reason):
    content = with_pieces(model_type, pieces, byte_fallback)
    with pytest.raises(UserError) as caught:
        converted(content)
    assert str(caught.value).startswith(f"tokenizer 'my.model': {reason}")
    assert "set data.tokenizer to a folder with a tokenizer.json" in str(caught.value)
