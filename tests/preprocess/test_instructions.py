"""Conversations and completions: which tokens are targets, and one message with the place for each damaged record."""

import json

import numpy as np
import pytest
from chat_tokenizer import CONVERSATION, MARKED, PLAIN, write_chat_tokenizer, write_chats

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import DataConfig
from lmtrain.data.shards import Shards
from lmtrain.hf import chat_template
from lmtrain.hf.chat_template import find_template
from lmtrain.hf.find_tokenizer import open_in_transformers
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.build import build_cache
from lmtrain.preprocess.document_settings import DocumentSettings
from lmtrain.preprocess.instructions import Completions, Conversations
from lmtrain.preprocess.text import Instruction
from lmtrain.preprocess.tokenize_instructions import tokenize_instructions

CHAT = DocumentSettings("text", True, False, format={"type": "chat"})
COMPLETION = DocumentSettings("text", False, True, format={"type": "completion"})


@pytest.fixture(scope="module", params=[MARKED, PLAIN], ids=["marked", "plain"])
def folder(request, tmp_path_factory):
    return str(write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))


def tokens_and_targets(folder, messages, loss_on="assistant", **more):
    """Token ids of a conversation, and the text of its targets."""
    reader = Conversations(find_template(folder, None, "chat_template"), "messages", loss_on)
    instruction = reader.read({"messages": messages, **more}, "here")
    if isinstance(instruction, UserError):
        raise instruction
    tokenizer = load_tokenizer(folder)
    found = tokenize_instructions([instruction], tokenizer, CHAT)
    assert found.lengths.tolist() == [len(found.tokens)]
    return found.tokens.tolist(), found.targets.tolist()


def decoded(folder, tokens, targets):
    """The texts of the runs of targets."""
    backend, runs, before = load_tokenizer(folder).backend, [], False
    for token, is_target in zip(tokens, targets, strict=True):
        if is_target:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
        before = is_target
    return [backend.decode(run, skip_special_tokens=False) for run in runs]


def test_tokens_are_those_of_transformers_and_targets_the_replies_with_their_end(folder):
    tokens, targets = tokens_and_targets(folder, CONVERSATION)
    theirs = open_in_transformers(folder)
    assert tokens == theirs.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    assert tokens[0] != tokens[1]  # one BOS token, which the template writes
    texts = decoded(folder, tokens, targets)
    assert [text.rstrip("\n") for text in texts] == ["The robot.<|im_end|>", "Nobody counts the stars.<|im_end|>"]


def test_marks_give_the_mask_of_transformers(tmp_path):
    folder = str(write_chat_tokenizer(tmp_path, MARKED))
    theirs = open_in_transformers(folder).apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, targets = tokens_and_targets(folder, CONVERSATION)
    assert tokens == theirs["input_ids"]
    assert list(map(int, targets)) == theirs["assistant_masks"]


def test_loss_on_the_last_message_and_on_all(folder):
    tokens, targets = tokens_and_targets(folder, CONVERSATION, "last")
    assert [text.rstrip("\n") for text in decoded(folder, tokens, targets)] == ["Nobody counts the stars.<|im_end|>"]
    assert all(tokens_and_targets(folder, CONVERSATION, "all")[1])


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_the_turn(tmp_path):
    earlier = "(message.content.split(' ')[-1] if message.role == 'assistant' and not loop.last else message.content)"
    thinking = PLAIN.replace("message.content", earlier)
    folder = str(write_chat_tokenizer(tmp_path, thinking))
    with pytest.raises(UserError) as caught:
        tokens_and_targets(folder, CONVERSATION)
    assert "here: message 3" in str(caught.value)
    assert "loss_on: last" in str(caught.value)
    tokens, targets = tokens_and_targets(folder, CONVERSATION, "last")
    assert decoded(folder, tokens, targets) == ["Nobody counts the stars.<|im_end|>\n"]


def test_marks_that_mark_nothing_count_as_no_marks(tmp_path):
    empty = PLAIN + "{% generation %}{% endgeneration %}"
    folder = str(write_chat_tokenizer(tmp_path, empty))
    tokens, targets = tokens_and_targets(folder, CONVERSATION)
    assert len(decoded(folder, tokens, targets)) == 2


def test_tools_and_variables_reach_the_template(tmp_path):
    more = "{{ tools[0].name if tools }}{{ style }}{{ depth }}" + PLAIN
    folder = str(write_chat_tokenizer(tmp_path, more))
    reader = Conversations(
        find_template(folder, None, "chat_template"), "turns", "assistant", {"style": "S", "depth": "D"}
    )
    record = {"turns": CONVERSATION, "tools": json.dumps([{"name": "T"}]), "chat_template_kwargs": {"depth": "E"}}
    assert reader.read(record, "here").text.startswith("TSE")
    assert reader.read({"turns": CONVERSATION}, "here").text.startswith("SD")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, ["no key 'messages'", "'other'", "format.messages_field"]),
        ([], ["an empty list"]),
        ("Hello", ["not JSON"]),
        ([["user", "Hello"]], ["message 1 is list"]),
        ([{"content": "Hello"}], ["message 1 has no role"]),
        ([{"from": "human", "value": "Hello"}], ["message 1 has no role", "rename 'from' to role"]),
        ([{"role": "human", "content": "Hello"}], ["message 1", "unknown role 'human'", "user"]),
        ([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}], ["message 2", "empty"]),
        ([{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2], ["messages 2 and 3"]),
        ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}], ["not UTF-8"]),
    ],
)
def test_a_damaged_conversation_is_one_error_with_file_and_line(tmp_path, messages, words):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": CONVERSATION})
    path.write_text(f"{good}\n{json.dumps({'other': 1} if messages is None else {'messages': messages})}\n")
    config = chat_config(tmp_path, folder, path)
    with pytest.raises(UserError) as caught:
        build_cache(config, "train")
    for word in (f"{path}:2: ", *words):
        assert word in str(caught.value)
    skipping = config.model_copy(update={"on_bad_record": "skip", "max_bad_fraction": 0.5})
    assert build_cache(skipping, "train").skipped == 1


def test_a_template_that_refuses_a_conversation_is_an_error_with_its_reason(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "{{ raise_exception('roles must alternate') }}")
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError, match=r"chats.jsonl:1: .*roles must alternate"):
        build_cache(config, "train")


def test_templates_cannot_leave_the_sandbox(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError, match="unsafe"):
        build_cache(config, "train")


def chat_config(tmp_path, folder, *paths, **settings):
    format = settings.pop("format", {"type": "chat"})
    cache = str(tmp_path / "cache")
    return DataConfig(
        train_urls=list(map(str, paths)), tokenizer=str(folder), cache_dir=cache, format=format, **settings
    )


def read_all(config, manifest):
    cache = Cache(f"{config.cache_dir}/train", manifest.recipe, [], manifest.dtype, Shards.of(manifest), "cut")
    store = open_store(config, cache)
    tokens, begins, targets = (part[0] for part in store.read_targets(np.array([0]), manifest.tokens))
    return tokens, begins, targets, [store.document_lengths(shard).tolist() for shard in range(len(manifest.shards))]


def test_a_cache_has_every_token_target_and_length(tmp_path, folder):
    chats = [CONVERSATION[: 2 * number + 1] for number in range(1, 3)] * 700  # over 2 blocks
    paths = [write_chats(tmp_path / f"{name}.jsonl", chats) for name in "ab"]
    config = chat_config(tmp_path, folder, *paths, num_preprocess_workers=2)
    manifest = build_cache(config, "train")
    alone = [tokens_and_targets(folder, chat) for chat in chats[:2]]
    expected = [np.array(sum((alone[number][part] for number in (0, 1)), []) * 1400) for part in (0, 1)]
    tokens, begins, targets, lengths = read_all(config, manifest)
    assert tokens.tolist() == expected[0].tolist()
    assert targets.tolist() == expected[1].tolist()
    assert lengths == [[len(alone[0][0]), len(alone[1][0])] * 700] * 2
    assert np.flatnonzero(begins).tolist() == np.cumsum(sum(lengths, []))[:-1].tolist()
    assert sum(shard.targets for shard in manifest.shards) == sum(expected[1])
    written = json.loads((tmp_path / "cache" / "train" / "manifest.json").read_text())
    assert written["format"] == 3
    assert load_manifest(str(tmp_path / "cache" / "train")) == manifest


def test_another_template_or_another_choice_of_targets_is_another_cache(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    path = write_chats(tmp_path / "chats.jsonl", [CONVERSATION])
    build_cache(chat_config(tmp_path, folder, path), "train")
    for format in ({"type": "chat", "loss_on": "last"}, {"type": "chat", "chat_template": MARKED}, {"type": "text"}):
        with pytest.raises(UserError, match="does not match"):
            build_cache(chat_config(tmp_path, folder, path, format=format), "train")
    # what has no effect on chats is no part of it, and neither is what happens to long ones when they are read
    same = chat_config(tmp_path, folder, path, enforce_bos=True, format={"type": "chat", "too_long": "drop"})
    build_cache(same, "train")


def test_contents_that_spell_special_tokens_and_conversations_without_targets_are_counted(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    spelled = [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "c"}]
    path = write_chats(tmp_path / "chats.jsonl", [CONVERSATION, spelled, CONVERSATION[:2]])
    manifest = build_cache(chat_config(tmp_path, folder, path), "train")
    (shard,) = manifest.shards
    assert len(shard.warnings) == 2
    assert "1 of 3 documents spell special tokens" in shard.warnings[0]
    assert "1 of 3 documents have no target" in shard.warnings[1]
    theirs = open_in_transformers(str(folder)).apply_chat_template(spelled, tokenize=True, return_dict=False)
    start = len(tokens_and_targets(str(folder), CONVERSATION)[0])
    tokens = read_all(chat_config(tmp_path, folder, path), manifest)[0]
    assert tokens[start : start + len(theirs)].tolist() == theirs


def test_special_tokens_of_a_template_are_parsed_where_text_is_split(tmp_path):
    folder = write_chat_tokenizer(tmp_path, PLAIN)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": True}))
    tokens, _ = tokens_and_targets(str(folder), CONVERSATION)
    end = load_tokenizer(str(folder)).backend.token_to_id("<|im_end|>")
    assert tokens.count(end) == len(CONVERSATION)


@pytest.mark.parametrize("wanted", ["short", "template.jinja", "{{ messages[0].content }}"])
def test_a_template_may_be_a_named_one_a_file_or_a_text(tmp_path, monkeypatch, wanted):
    monkeypatch.chdir(tmp_path)
    text = "{{ messages[0].content }}"
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text(text)
    (tmp_path / "template.jinja").write_text(text)
    assert find_template(str(folder), wanted, "x").render(CONVERSATION).text == "Be brief."
    with pytest.raises(UserError, match=r"x: other: .*short"):
        find_template(str(folder), "other", "x")


def test_a_tokenizer_without_a_template_is_an_error_with_advice(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", None)
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError, match=r"data.format.chat_template: .*chat_template.jinja"):
        build_cache(config, "train")


def test_completions_are_targets_and_end_in_an_eos_token(folder):
    reader = Completions("prompt", "completion", " -> ")
    tokenizer = load_tokenizer(folder)
    one = reader.read({"prompt": "the robot", "completion": "counts"}, "here")
    assert isinstance(one, Instruction)
    found = tokenize_instructions([one, one], tokenizer, COMPLETION)
    tokens, targets = found.tokens[: len(found.tokens) // 2], found.targets[: len(found.tokens) // 2]
    assert tokens[0] == tokenizer.bos_id
    assert tokens[-1] == tokenizer.eos_id
    (text,) = decoded(folder, tokens.tolist(), targets.tolist())
    assert text.lstrip().startswith("counts")
    assert targets[-1]
    assert not targets[0]
    assert tokenizer.backend.decode(tokens[1:-1].tolist()) == "the robot -> counts"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"completion": "b"}, ["no key 'prompt'", "format.input_field"]),
        ({"prompt": "a"}, ["no key 'completion'", "format.output_field"]),
        ({"prompt": "a", "completion": 3}, ["'completion' is int"]),
        ({"prompt": "a", "completion": ""}, ["'completion' is empty"]),
    ],
)
def test_a_damaged_completion_is_an_error(record, words):
    found = Completions("prompt", "completion", "").read(record, "here")
    assert isinstance(found, UserError)
    for word in ("here: ", *words):
        assert word in str(found)


def test_a_token_of_the_template_that_the_tokenizer_would_split_is_an_error(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", PLAIN.replace("<|im_end|>", "<|eot_id|>"))
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError) as caught:
        build_cache(config, "train")
    assert "<|eot_id|>" in str(caught.value)
    assert "--special_tokens" in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("json", "dataset", "jsonl.gz"))]
)
def test_every_kind_of_source_gives_the_same_tokens(tmp_path, kind):
    import gzip

    import pyarrow
    from pyarrow import parquet

    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    chats = [CONVERSATION, CONVERSATION[1:3]]
    plain = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", chats))
    expected = read_all(plain, build_cache(plain, "train"))
    rows = [{"messages": chat, "other": 1} for chat in chats]
    path = tmp_path / f"chats.{kind}"
    source = {"train_urls": [str(path)]}
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        path = tmp_path / "parquet" / "train.parquet" if kind == "dataset" else path
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        source = {"id": str(path.parent)} if kind == "dataset" else source
    config = plain.model_copy(update={"train_urls": None, "cache_dir": str(tmp_path / "other"), **source})
    found = read_all(config, build_cache(config, "train"))
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here, there)


def test_rendering_looks_for_the_hub_once_in_a_process_not_for_each_conversation(tmp_path, monkeypatch):
    template = find_template(str(write_chat_tokenizer(tmp_path)), None, "x")
    looked = []
    monkeypatch.setattr(chat_template, "prepare_hub", lambda: looked.append(1))
    chat_template._renderer.cache_clear()
    for _ in range(3):
        template.render(CONVERSATION)
    assert len(looked) == 1
