"""The rules that are read are those that the sentencepiece library applies."""

import pytest
import sentencepiece
from sentencepiece_texts import parsed, train

from lmtrain.hf.sentencepiece_normalizer import read_rules


def test_the_rules_are_those_of_the_library():
    content = train(normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=False, remove_extra_whitespaces=False)
    rules = read_rules(parsed(content).normalizer_spec.precompiled_charsmap)
    assert len(rules) > 200_000
    assert (rules["½"], rules["\x01"], rules["E\u0301"], rules["\t"]) == ("1\u20442", "", "é", " ")
    assert "a" not in rules
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    for unit in list(rules)[::100]:
        assert theirs.normalize(unit) == rules[unit].replace(" ", "▁")


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\x08\0\0\0abcd", b"\x00\x01\0\0" + bytes(8), b"\x06\0\0\0" + bytes(9)]
)
def test_other_content_is_an_error(content):
    with pytest.raises(ValueError, match="not a normalization of sentencepiece"):
        read_rules(content)


def test_a_trie_with_a_cycle_is_an_error():
    """The child of each node is the node itself."""
    units = b"\x61\0\0\0" * 256
    with pytest.raises(ValueError, match="not a normalization of sentencepiece"):
        read_rules(len(units).to_bytes(4, "little") + units + b"\0")
