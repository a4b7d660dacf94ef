"""Pairs of answers: every form, one message for each damaged record, and caches of them."""

import json

import numpy as np
import pytest
from cache_building import build_cache, open_built
from chat_tokenizer import PLAIN, write_chat_tokenizer
from conftest import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.config import DataConfig
from lmtrain.data.windows import PairWindows
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.recipe import chat_template_of, recipe_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import BadRecordError, EqualAnswersError, read_document
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.tokenize import tokenize
from lmtrain.runtime.errors import UserError

ASK, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Who?"), ("assistant", "Me."), ("assistant", "No one."))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), PLAIN))


def read(record, folder=str(TOKENIZER), **settings):
    """The two texts of a record, and the text of the targets of each."""
    config = DataConfig(tokenizer=folder, format={"type": "preference"}, **settings)
    tokenizer = load_tokenizer(folder)
    pair = read_document(record_reader(config, tokenizer.vocab_size, chat_template_of(config)), record)
    batch = tokenize([pair], tokenizer, config)
    parts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    targets = np.split(batch.targets, np.cumsum(batch.lengths)[:-1])

    def decode(ids):
        return tokenizer.library.decode(ids.tolist(), skip_special_tokens=False)

    return [decode(ids) for ids in parts], [decode(ids[own]) for ids, own in zip(parts, targets, strict=True)]


TEXTS = (
    ["A star is big.<|endoftext|>", "A star is small.<|endoftext|>"],
    [" big.<|endoftext|>", " small.<|endoftext|>"],
)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "A star is", "chosen": " big.", "rejected": " small."},
        {"prompt": "A star is", "chosen": " big.<|endoftext|>", "rejected": " small."},
        {"chosen": "A star is big.", "rejected": "A star is small."},
    ],
)
def test_texts_get_an_eos_token_and_the_prompt_is_no_target(record):
    assert read(record) == TEXTS


def test_a_bos_token_is_no_target():
    texts, targets = read({"prompt": "A", "chosen": " b", "rejected": " c"}, enforce_bos=True)
    assert texts == ["<|endoftext|>A b<|endoftext|>", "<|endoftext|>A c<|endoftext|>"]
    assert targets == [" b<|endoftext|>", " c<|endoftext|>"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "Who?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},  # the prompt is in the messages, too
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [{"role": "system", "content": ""}, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "Who?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "messages": [ASK, GOOD], "score_chosen": 8.0},
        {"prompt": json.dumps([ASK]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    ],
)
def test_messages_are_written_by_the_template_and_targets_start_after_the_header(folder, record):
    texts, targets = read(record, folder)
    asked = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert targets == ["Me.<|im_end|>\n", "No one.<|im_end|>\n"]
    assert texts == [f"<|endoftext|>{asked}{target}" for target in targets]


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "system": "S"},
        {"prompt": [SYSTEM, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [SYSTEM, ASK], "chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD], "system": "S"},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "system_prompt": "S"},
    ],
)
def test_a_system_text_is_a_part_of_the_prompt_and_a_repeated_prompt_is_read_once(folder, record):
    texts, targets = read(record, folder)
    assert targets == ["Me.<|im_end|>\n", "No one.<|im_end|>\n"]
    asked = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"<|endoftext|>{asked}{target}" for target in targets]


def test_answers_may_have_several_messages(folder):
    more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    _, targets = read({"prompt": [ASK], "chosen": [GOOD, *more], "rejected": [BAD]}, folder)
    assert targets[0].startswith("Me.<|im_end|>\n<|im_start|>user\nSure?")
    _, targets = read({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, *more]}, folder)  # a part of the other one
    assert targets[0] == "Me.<|im_end|>\n"
    assert targets[1].endswith("Yes.<|im_end|>\n")
    own = [{"role": "user", "content": "Or?"}, {"role": "assistant", "content": "So."}]
    _, targets = read({"chosen": [ASK, GOOD, *more], "rejected": [ASK, GOOD, *own]}, folder)
    assert targets[1] == "<|im_start|>user\nOr?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"chosen": "a b"}, ["'rejected'", "data.format.rejected_field"]),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, ["'prompt'"]),
        ({"chosen": None, "rejected": "b"}, ["'chosen'"]),
        ({"chosen": "a", "rejected": "b"}, ["data.format.prompt_field"]),
        ({"chosen": "", "rejected": "b"}, ["data.format.prompt_field"]),
        ({"prompt": "a", "chosen": [ASK, GOOD], "rejected": "b"}, ["'chosen'"]),
        ({"prompt": [ASK], "chosen": [], "rejected": [BAD]}, ["answer"]),
        ({"chosen": [GOOD], "rejected": [BAD]}, ["data.format.prompt_field"]),
        ({"prompt": [ASK], "chosen": [{"role": "assistant"}], "rejected": [BAD]}, ["content"]),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, ["not UTF-8"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "S"}, ["'system'"]),
        ({"question": "Why?", "chosen": "<think>a", "rejected": "<think>b"}, ["'question'"]),
        ({"instruction": "Add.", "input": "1", "chosen": "It is 2", "rejected": "It is 3"}, ["'instruction'"]),
        ({"messages": [ASK], "chosen": "It is me", "rejected": "It is you"}, ["'messages'"]),
        (
            {"prompt": "a", "messages": [{"role": "system", "content": "S"}], "chosen": "b", "rejected": "c"},
            ["'messages'"],
        ),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "context": "A passage."}, ["'context'"]),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, ["'rejected'"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "kto_tag": False}, ["'kto_tag'"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "winner_model_b": 1}, ["'winner_model_b'"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "is_swapped": True}, ["'is_swapped'"]),
        ({"prompt": [ASK], "chosen": [GOOD, ASK], "rejected": [BAD]}, ["answer"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "rationale": "Hm"}, ["'rationale'"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]]}, ["'history'"]),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "weight": 0.5}, ["'weight'"]),
        ({"prompt": [ASK], "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]}, ["answer"]),
        ({"prompt": [ASK], "chosen": [{"role": "user", "content": "x"}, GOOD], "rejected": [BAD]}, ["'prompt'"]),
        ({"prompt": "No.", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["'prompt'"]),
        ({"conversations": [SYSTEM, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["'conversations'"]),
        ({"prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [BAD]}, ["'prompt'", "both"]),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, ["'prompt'"]),
    ],
)
def test_a_damaged_record_is_one_clear_error(folder, record, names):
    with pytest.raises(BadRecordError) as caught:
        read(record, folder)
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize("kind", ["text", "chat", "completion"])
def test_pairs_under_another_format_name_the_setting(folder, kind):
    config = DataConfig(tokenizer=folder, format={"type": kind})
    reader = record_reader(config, 0, chat_template_of(config))
    with pytest.raises(BadRecordError, match=r"data.format: .type: preference"):
        reader.read({"prompt": "a", "chosen": "b", "rejected": "c"})


def test_messages_without_a_template_are_an_error():
    with pytest.raises(UserError, match=r"'chosen' .*chat_template"):
        read({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]})


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_texts_of_any_kind_are_kept(prompt, chosen, rejected):
    config = DataConfig(tokenizer=str(TOKENIZER), format={"type": "preference"})
    try:
        pair = read_document(record_reader(config, 0), {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    except EqualAnswersError:
        assert chosen == rejected
        return
    except BadRecordError as error:
        is_empty = not (chosen and rejected)
        assert "not UTF-8" in str(error) or is_empty  # noqa: PT017
        return
    batch = tokenize([pair], load_tokenizer(str(TOKENIZER)), config)
    assert len(batch.lengths) == 2
    ends = np.cumsum(batch.lengths)
    assert batch.targets[ends - 1].all()  # each has at least an EOS token


def test_a_cache_keeps_pairs_together_leaves_out_equal_ones_and_drops_duplicates_as_pairs(tmp_path):
    rows = [{"prompt": "A star", "chosen": f" is {n}.", "rejected": f" has {n} robots."} for n in range(5)]
    rows.append({"prompt": "A star", "chosen": " is.", "rejected": " is."})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train_urls=[str(path)],
        tokenizer=str(TOKENIZER),
        cache_dir=str(tmp_path / "cache"),
        format={"type": "preference"},
        num_preprocess_workers=1,
    )
    manifest = build_cache(config, "train")
    assert load_manifest(f"{config.cache_dir}/train") == manifest
    (shard,) = manifest.shards
    assert shard.documents == 10
    assert len(shard.warnings) == 1
    assert f"{path}:6: 1 " in shard.warnings[0]
    store = open_built(config)
    assert store.has_pairs
    windows = PairWindows(store, 64)
    number = windows.for_training()
    documents = [windows.documents_of(window).tolist() for window in range(number)]
    assert [numbers[0] % 2 for numbers in documents] == [0] * number
    assert sum(documents, []) == list(range(10))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "A star", "chosen": " is.", "rejected": " is."}, "equal"),
        ({"chosen": "A star is.", "rejected": "A star is."}, "equal"),
        ({"prompt": "A star", "chosen": "A star is.", "rejected": "A star has."}, "prompt"),
        ({"prompt": "A star", "chosen": "A star is.", "rejected": " has."}, "prompt"),
    ],
)
def test_a_source_of_which_nothing_or_the_prompt_would_be_learned_is_an_error(tmp_path, record, words):
    path = tmp_path / "pairs.jsonl"
    path.write_text(2 * (json.dumps(record) + "\n"))
    config = DataConfig(tokenizer=str(TOKENIZER), format={"type": "preference"})
    with pytest.raises(UserError, match=rf"pairs\.jsonl:1: .*{words}"):
        list(DocumentReader(describe_source(str(path)), record_reader(config, 0)))


def test_the_recipe_has_what_changes_the_tokens():
    tokenizer = load_tokenizer(str(TOKENIZER))

    def recipe(**settings):
        config = DataConfig(tokenizer=str(TOKENIZER), format={"type": "preference", **settings})
        return recipe_of(config, tokenizer, chat_template_of(config))

    assert recipe() == recipe(too_long="drop")
    assert recipe() != recipe(chosen_field="better")
    assert recipe() != recipe(ignored_fields=["system"])
    assert recipe() != recipe(chat_template=PLAIN)
