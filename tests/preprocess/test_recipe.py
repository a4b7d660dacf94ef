"""Recipes and sources of caches: how documents become tokens, and which differences are refused."""

import re

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from lmtrain.data.config import DataConfig
from lmtrain.hf.extend_tokenizer import learn_bpe
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.recipe import chat_template_of, check_sources, check_special_tokens, recipe_of, token_dtype
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


def source(url, content="x", start=None):
    return {"url": url, "bytes": 9, "fingerprint": content, "start": start}


A, B, C = map(source, "abc")


def refusal(cached, wanted, complete=True):
    with pytest.raises(UserError) as error:
        check_sources("folder", dict(enumerate(cached)), dict(enumerate(wanted)), complete)
    first, line, last = str(error.value).splitlines()
    assert first.startswith("folder: ")
    assert "data.cache_dir" in last
    return line.strip()


def test_files_may_move_to_another_folder_and_shards_may_be_missing_until_a_cache_is_complete():
    check_sources("folder", {0: A, 1: B}, {0: source("moved/a"), 1: source("moved/b")}, complete=True)
    check_sources("folder", {1: B}, {0: A, 1: B}, complete=False)


@pytest.mark.parametrize(
    ("cached", "wanted", "complete", "line"),
    [
        ([A, B, C], [A, B], True, "c is in the cache"),
        ([A, B], [A, B, C], True, "c is a source of this config"),
        ([B], [C], False, "b is in the cache"),
        ([A, B], [A, source("b", "y")], True, "b has changed since it was cached"),
        ([A, B], [source("moved/a", "y"), B], False, "a is in the cache"),
        ([A, B], [B, A], True, ".*another order"),
        ([A, B], [A, B, B], True, ".*another order"),
        ([source("a", "x", 7000)], [A], False, "a from byte 7,000 is in the cache"),
        # URLs that differ in their credentials only are the same without them
        ([A, source("a", "y")], [source("a", "y"), A], True, ".*another order"),
    ],
)
def test_other_sources_are_named(cached, wanted, complete, line):
    assert re.match(line, refusal(cached, wanted, complete))
