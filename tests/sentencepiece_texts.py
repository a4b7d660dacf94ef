"""Small sentencepiece models, texts to compare tokenizers on, and the comparison."""

import functools
import io
import json
import random
from collections.abc import Iterable

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from lmtrain.hf.sentencepiece_normalizer import read_rules

RULES = ["identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"]
_WORDS = """the rain in spain stays mainly in the plain and foo bar fool xfoo aaa hello world e\u0301te\u0301 ünï ①② ½
ガギグ 한국어 1/2 x=3 them thefoo"""
_TAGS = "<b> </b> <i>x</i> a<b c>d [INST] </s> <s> unk pad <0x0A> 0x41 </p><p> /s> s> </"
PLAIN = _WORDS.split()
HTML = [*PLAIN, *_TAGS.split()]
CONTROL = ["[INST]", "<D>"]
SYMBOLS = ["foo", "the", "①", "\n", "<B>", "▁the", "<0x", "e\u0301", "\u0301x"]
_SPACES = [" ", " ", "  ", "\n", "\t", "\r\n", "\u3000", "▁", "\x01", "\u200b", "\xa0", "\0", "\x8f"]
_CODES = ["\x80", "\x81", "\x82\x80", "\x83\x80", "\x84\x80", "\x85\x800\x85\x80"]  # of the converted tokenizer
_MARKS = ["\u0301", "\u0323", "\u0345", "\u200d", "\u3099", "\uff9e", "\u0307", "\u1161", "\u11a8", "\u1112"]
_PARTS = ["<", "/", ">", "s", "0x", "[", "INST", "]", "</s", "s>", "e", "t", "fo", "o", "I", "½"]

_VOWELS_AND_FINALS = {
    chr(code) for span in ((0x1160, 0x1200), (0x3130, 0x3190), (0xFFA0, 0xFFE0)) for code in range(*span)
}


def train(words: Iterable[str] = PLAIN, **options) -> bytes:
    """A model trained on sentences of the words."""
    chance = random.Random(0)
    words, model = list(words), io.BytesIO()
    defaults = {"vocab_size": 470 if options.get("byte_fallback") else 200, "hard_vocab_limit": False, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(chance.choices(words, k=12)) for _ in range(300)),
        model_writer=model,
        **defaults | options,
    )
    return model.getvalue()


def parsed(content: bytes) -> "sentencepiece_model_pb2.ModelProto":
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(content)
    return proto


@functools.cache
def _units(rule: str) -> list[str]:
    """Sequences of characters that a rule replaces, fewer of those of Hangul."""
    units = sorted(read_rules(parsed(train(normalization_rule_name=rule)).normalizer_spec.precompiled_charsmap))
    hangul = [unit for unit in units if len(unit) > 1 and unit[-1] in _VOWELS_AND_FINALS]
    return sorted({*units} - {*hangul}) + hangul[::200]


def random_texts(seed: int, count: int, names: list[str]) -> list[str]:
    """Half of random code points, half of spelled names, words, spaces, marks and sequences that rules replace."""
    chance = random.Random(seed)
    units = _units("nmt_nfkc_cf")

    def code_point() -> str:
        code = chance.randrange(chance.choice([0x80, 0x800, 0x3100, 0xFFFF, 0x20000, 0x10F800]))
        return chr(code if code < 0xD800 else code + 0x800)

    def part() -> str:
        kinds = [HTML, names, _PARTS, _SPACES, _MARKS, units, [code_point()], _CODES]
        return chance.choice(chance.choices(kinds, [15, 20, 10, 15, 10, 20, 10, 2])[0])

    texts = ["".join(code_point() for _ in range(chance.randrange(20))) for _ in range(count // 2)]
    return texts + ["".join(part() for _ in range(chance.randrange(1, 10))) for _ in range(count - len(texts))]


def check_ids(content: bytes, ours: Tokenizer, texts: Iterable[str]) -> None:
    """Compare ids, and the decoded texts without unknown characters, with those of the sentencepiece library.

    The library adds the scores of a unigram model in single precision, so either may be found of two segmentations
    whose scores differ less than this precision.
    """
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours.encode_special_tokens = True
    vocabulary = json.loads(ours.to_str())["model"]["vocab"]
    for text in texts:
        ids, expected = ours.encode(text, add_special_tokens=False).ids, theirs.encode(text)
        if ids != expected and isinstance(vocabulary, list):
            found, best = (sum(vocabulary[number][1] for number in numbers) for numbers in (ids, expected))
            assert abs(found - best) < 1e-5, text
        else:
            assert ids == expected, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), text
