"""The rules that are read are those of the sentencepiece library, and the normalization is the same."""

import pytest
import sentencepiece
from sentencepiece_texts import parsed, random_texts, train
from tokenizers import normalizers

from lmtrain.hf.sentencepiece import convert_sentencepiece
from lmtrain.hf.sentencepiece_normalizer import build_normalizers, read_rules
from lmtrain.runtime.errors import UserError

# All characters of the planes that have rules and marks, and a sample of the others.
_PLANES = [range(0xD800), range(0xE000, 0x20000), range(0x2F800, 0x2FA20), range(0xE0000, 0xE0200)]
ALL = [chr(code) for span in [*_PLANES, range(0x20000, 0x110000, 50)] for code in span]
# Bases with one and two bytes that a rule replaces, starts of rules, and characters that grapheme clusters begin with.
BASES = ["½", "I", "a", "\r", "\u03b1", "\uff76", "\u1100", "\u2126", "\u0600", "가", "¨", "\u200d™", "\U0001f130", "<"]
SPACES = ["\n a \t", "a\n", "\t", "", " a  b ", "▁", "a▁ ", "▁ a", " \x01", "\x01", "\xa0a\xa0", "\u200b"]
CLUSTERS = ["½\u200d", "½\u0301x", "\r\n", "ｶﾞ", "e\u0301\u0301", "\uff41\u0301", "I\u0307", "\u03b1\u0345"]
CONTROLS = ["\x80\x81", "\x84\x80 \x82\x80\x83\x80", "\x81\x80", "\x85\x800\x85\x80"]


def check(content: bytes, texts: list[str]) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    proto = parsed(content)
    symbols = frozenset(piece.piece for piece in proto.pieces if piece.type == 4)
    steps = build_normalizers(proto.normalizer_spec, proto.trainer_spec.treat_whitespace_as_suffix, symbols)
    ours = normalizers.Sequence(steps)
    different = [text for text in texts if ours.normalize_str(text) != theirs.normalize(text)]
    assert different == []


@pytest.mark.parametrize("rule", ["identity", "nfkc", "nmt_nfkc_cf"])
def test_no_character_is_lost_and_only_spaces_are_removed(rule):
    pairs = [base + letter for base in BASES for letter in ALL[::3000]]
    for squeeze in (True, False):
        content = train(normalization_rule_name=rule, remove_extra_whitespaces=squeeze)
        check(content, [*SPACES, *CLUSTERS, *CONTROLS, *pairs])


@pytest.mark.long
@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc_cf"])
def test_each_character_is_normalized_after_each_base(rule):
    content = train(normalization_rule_name=rule, remove_extra_whitespaces=False)
    check(content, ALL)
    for base in BASES:
        check(content, [base + letter for letter in (ALL if base == "½" else ALL[::20])])


@pytest.mark.parametrize("squeeze", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_the_added_space_can_be_at_the_end(rule, squeeze):
    content = train(normalization_rule_name=rule, treat_whitespace_as_suffix=True, remove_extra_whitespaces=squeeze)
    texts = ["a", " a ", "", " ", "  ", "\x01", " \x01 ", "▁", "a▁", "\n", "\x84\x80", *random_texts(0, 500, ["</s>"])]
    check(content, texts)


def test_own_rules_are_applied_or_refused(tmp_path):
    rules = tmp_path / "rules.tsv"

    def trained(lines: str) -> bytes:
        rules.write_text(lines)
        return train(normalization_rule_tsv=str(rules))

    # "ab" becomes "x", which alone would become "yy"; "abc" is longer
    content = trained("61 62\t78\n78\t79 79\n61 62 63\t7A\n65 301\t65\n68\t\n")
    check(content, ["ab", "x", "abc", "abx", "ababcab", "e\u0301e", "hello", "h", *random_texts(0, 300, ["ab", "abc"])])
    with pytest.raises(UserError, match=r"'\\x80'"):
        convert_sentencepiece(trained("80\t61\n"), "my.model")


@pytest.mark.parametrize("change", ["escape", "symbol", "denormalization"])
def test_what_cannot_be_represented_is_refused(change):
    symbols = ["a b"] if change == "symbol" else []
    proto = parsed(train(normalization_rule_name="identity", user_defined_symbols=symbols))
    proto.normalizer_spec.escape_whitespaces = change != "escape"
    proto.denormalizer_spec.precompiled_charsmap = b"x" if change == "denormalization" else b""
    with pytest.raises(UserError, match=r"^tokenizer 'my\.model': "):
        convert_sentencepiece(proto.SerializeToString(), "my.model")


def test_the_rules_are_those_of_the_library():
    content = train(normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=False, remove_extra_whitespaces=False)
    rules = read_rules(parsed(content).normalizer_spec.precompiled_charsmap)
    assert len(rules) > 200_000
    assert (rules["½"], rules["\x01"], rules["E\u0301"], rules["\t"]) == ("1\u20442", "", "é", " ")
    assert "a" not in rules
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    for unit in list(rules)[::100]:
        assert theirs.normalize(unit) == rules[unit].replace(" ", "▁")


CYCLE = b"\x61\0\0\0" * 256  # the child of each node is the node itself


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x08\0\0\0abcd", b"\x00\x01\0\0" + bytes(8), b"\x06\0\0\0" + bytes(9)),
        len(CYCLE).to_bytes(4, "little") + CYCLE + b"\0",
    ],
)
def test_other_content_is_an_error(content):
    with pytest.raises(ValueError, match="sentencepiece"):
        read_rules(content)
