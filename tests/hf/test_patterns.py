"""Patterns match the same strings in the `tokenizers` library."""

from tokenizers import Regex, normalizers

from lmtrain.hf.sentencepiece_normalizer import letter_class, literal, longest


def marked(pattern: str, text: str) -> str:
    return normalizers.Replace(Regex(pattern), "_").normalize_str(text)


def test_a_literal_matches_its_text_only():
    assert marked(literal("a.*["), "a.*[ab[") == "_ab["


def test_a_class_matches_each_of_its_letters():
    assert letter_class("cabz]-") == r"[\x{2D}-\x{2D}\x{5D}-\x{5D}\x{61}-\x{63}\x{7A}-\x{7A}]"
    assert marked(letter_class("cabz]-\U0001f600"), "abcdz]-\U0001f600e") == "___d____e"


def test_the_longest_string_matches():
    assert longest(set()) == ""
    assert marked(longest({"ab", "abc", "b", "abcde", "x.", "dd"}), "abcd ab abcde bx.xdd") == "_d _ _ __x_"
