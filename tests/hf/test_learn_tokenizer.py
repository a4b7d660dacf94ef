"""Byte-level BPE, trained on text."""

from lmtrain.hf.extend_tokenizer import END_OF_TEXT, learn_bpe

TEXTS = ["one two three two", "two three"] * 50


def test_training_twice_gives_the_same_tokenizer_of_the_requested_size():
    tokenizer = learn_bpe(TEXTS, 262, ["<|a|>"])
    assert tokenizer.to_str() == learn_bpe(TEXTS, 262, ["<|a|>"]).to_str()
    assert tokenizer.get_vocab_size() == 262
    assert [tokenizer.token_to_id(token) for token in (END_OF_TEXT, "<|a|>")] == [0, 1]


def test_any_text_is_restored_and_frequent_pairs_are_merged():
    tokenizer = learn_bpe(TEXTS, 280)
    text = "naïve — 東京 🚀\r\n\x00 end "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("two").ids) == 1
