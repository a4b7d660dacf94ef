"""Recipes and sources of caches: how documents become tokens, and which differences are refused."""

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from lmtrain.data.config import DataConfig
from lmtrain.hf.extend_tokenizer import learn_bpe
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.recipe import chat_template_of, check_special_tokens, recipe_of, token_dtype
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "<u2"), (65536, "<u2"), (65537, "<u4"), (256000, "<u4")])
def test_tokens_have_two_bytes_if_they_suffice(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_an_enforced_token_must_exist(tmp_path, name):
    learn_bpe(["some text"], 260).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=f"no {name}_token .*data.enforce_{name}: false"):
        check_special_tokens(tokenizer, DataConfig(enforce_eos=name == "eos", enforce_bos=name == "bos"))
    check_special_tokens(tokenizer, DataConfig(enforce_eos=False))


def test_tokens_that_transformers_adds_to_texts_are_warned_of_once_unless_set(tmp_path, caplog):
    backend = learn_bpe(["some text"], 260)
    backend.add_special_tokens(["<s>", "<cls>"])
    numbers = [(token, backend.token_to_id(token)) for token in ("<s>", "<cls>", "<|endoftext|>")]
    for name, template, warned in (
        ("bos", "<s> $A <|endoftext|>", ["<s>", "data.enforce_bos"]),
        ("cls", "<cls> $A", ["<cls>"]),
        ("eos", "$A <|endoftext|>", []),
    ):
        backend.post_processor = TemplateProcessing(single=template, special_tokens=numbers)
        save_tokenizer(backend, str(tmp_path / name), eos="<|endoftext|>", bos="<s>")
        tokenizer = load_tokenizer(str(tmp_path / name))
        caplog.clear()
        if name == "bos":
            for enforced in (True, False):
                check_special_tokens(tokenizer, DataConfig(enforce_bos=enforced))
            check_special_tokens(tokenizer, DataConfig(format={"type": "chat"}))
            assert not caplog.messages
        for _ in range(2):
            check_special_tokens(tokenizer, DataConfig())
        assert len(caplog.messages) == bool(warned)
        assert all(part in caplog.text for part in warned)


def test_completions_require_an_eos_token_and_conversations_neither(tmp_path):
    learn_bpe(["some text"], 260).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    check_special_tokens(tokenizer, DataConfig(format={"type": "chat"}))
    with pytest.raises(UserError, match="eos_token"):
        check_special_tokens(tokenizer, DataConfig(enforce_eos=False, format={"type": "completion"}))
    with pytest.raises(UserError, match="passthrough"):  # conversations are texts
        chat_template_of(DataConfig(tokenizer="passthrough", vocab_size=9, enforce_eos=False, format={"type": "chat"}))


def test_the_recipe_has_no_setting_without_effect_and_none_that_is_newer_than_old_caches():
    recipe = recipe_of(DataConfig(), open_tokenizer("byte"), None)
    assert recipe["documents"].keys() == {"on_bad_record", "text_key", "enforce_eos", "enforce_bos"}
    completion = recipe_of(DataConfig(format={"type": "completion"}, text_key="x"), open_tokenizer("byte"), None)
    assert completion["documents"].keys() == {"on_bad_record", "enforce_bos", "format"}
    assert "too_long" not in completion["documents"]["format"]
