"""Conversations and completions: which tokens are targets, and one message with the place for each damaged record."""

import dataclasses
import json

import numpy as np
import pytest
from cache_building import build_cache, open_built
from chat_tokenizer import CONVERSATION, MARKED, PLAIN, write_chat_tokenizer, write_chats

from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import find_template
from lmtrain.hf.find_tokenizer import open_in_transformers
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.instructions import Completions, Conversations
from lmtrain.preprocess.recipe import chat_template_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import BadRecordError, read_document
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.preprocess.tokenize import tokenize
from lmtrain.preprocess.write_shard import WARNINGS
from lmtrain.runtime.errors import UserError

COMPLETIONS = Completions(input_field="prompt", output_field="completion", separate_with="")
CHAT = DataConfig(format={"type": "chat"})
COMPLETION = DataConfig(enforce_eos=False, enforce_bos=True, format={"type": "completion"})


@pytest.fixture(scope="module", params=[MARKED, PLAIN], ids=["marked", "plain"])
def folder(request, tmp_path_factory):
    return str(write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))


def tokens_and_targets(folder, messages, loss_on="assistant", **more):
    """Token ids of a conversation, and the text of its targets."""
    reader = Conversations(
        template=find_template(folder, None, "chat_template"), messages_field="messages", loss_on=loss_on
    )
    instruction = reader.read({"messages": messages, **more})
    tokenizer = load_tokenizer(folder)
    found = tokenize([instruction], tokenizer, CHAT)
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


@pytest.mark.parametrize(
    ("loss_on", "marks", "texts"),
    [
        ("assistant", {2: False}, ["Nobody counts the stars.<|im_end|>"]),
        ("assistant", {2: True, 4: False}, ["The robot.<|im_end|>"]),
        ("assistant", {0: False, 2: False, 4: False}, []),
        ("last", {2: True}, ["Nobody counts the stars.<|im_end|>"]),
        ("last", {4: False}, []),
        ("all", {1: True, 2: False}, None),
    ],
)
def test_messages_that_are_marked_as_no_target_are_none(folder, loss_on, marks, texts):
    messages = [{**m, "weight": int(marks[n])} if n in marks else m for n, m in enumerate(CONVERSATION)]
    tokens, targets = tokens_and_targets(folder, messages, loss_on)
    assert tokens == tokens_and_targets(folder, CONVERSATION, loss_on)[0]
    found = [text.rstrip("\n") for text in decoded(folder, tokens, targets)]
    if texts is None:
        assert "Who counts" in found[0]
        assert found[1].startswith("<|im_start|>user\nAnd the stars?")
        assert not any("The robot." in text for text in found)
    else:
        assert found == texts


def test_a_message_that_is_marked_as_a_target_against_its_role_is_an_error(folder):
    messages = [CONVERSATION[1] | {"train": True}, CONVERSATION[2]]
    with pytest.raises(BadRecordError, match=r"message 1 .*data.format.loss_on"):
        tokens_and_targets(folder, messages)
    assert all(tokens_and_targets(folder, messages, "all")[1])


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_the_turn(tmp_path):
    earlier = "(message.content.split(' ')[-1] if message.role == 'assistant' and not loop.last else message.content)"
    thinking = PLAIN.replace("message.content", earlier)
    folder = str(write_chat_tokenizer(tmp_path, thinking))
    with pytest.raises(BadRecordError) as caught:
        tokens_and_targets(folder, CONVERSATION)
    assert str(caught.value).startswith("message 3")
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
        template=find_template(folder, None, "chat_template"),
        messages_field="turns",
        loss_on="assistant",
        variables={"style": "S", "depth": "D"},
    )
    record = {"turns": CONVERSATION, "tools": json.dumps([{"name": "T"}]), "chat_template_kwargs": {"depth": "E"}}
    assert reader.read(record).text.startswith("TSE")
    assert reader.read({"turns": CONVERSATION}).text.startswith("SD")


def test_a_damaged_conversation_is_one_error_with_file_and_line(tmp_path):
    config = chat_config(tmp_path, write_chat_tokenizer(tmp_path / "tokenizer"), tmp_path / "chats.jsonl")
    write_chats(tmp_path / "chats.jsonl", [CONVERSATION, [], [{"role": "user", "content": "\ud800"}]])
    with pytest.raises(UserError, match=r"chats\.jsonl:2: 'messages' is an empty list"):
        list(documents(config))
    reader = documents(config, skip_bad=True)
    assert len(list(reader)) == 1
    assert f"{tmp_path}/chats.jsonl:3: not UTF-8" in reader.bad_records[1]


@pytest.mark.parametrize("depth", [400, 900])
def test_a_message_that_is_nested_deeply_is_an_error_with_its_place(tmp_path, depth):
    reader = Conversations(
        template=find_template(str(write_chat_tokenizer(tmp_path)), None, "x"), messages_field="messages", loss_on="all"
    )
    nested = []
    for _ in range(depth):
        nested = [nested]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": nested}]
    with pytest.raises(BadRecordError):
        read_document(reader, {"messages": messages})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"chats\.jsonl:1: .*roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_a_conversation_or_leaves_the_sandbox_is_an_error(tmp_path, template, reason):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", template)
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError, match=reason):
        list(documents(config))


def documents(config, skip_bad=False):
    return DocumentReader(
        describe_source(config.train_urls[0]), record_reader(config, 0, chat_template_of(config)), skip_bad
    )


def chat_config(tmp_path, folder, *paths, **settings):
    format = settings.pop("format", {"type": "chat"})
    cache = str(tmp_path / "cache")
    return DataConfig(
        train_urls=list(map(str, paths)), tokenizer=str(folder), cache_dir=cache, format=format, **settings
    )


def read_all(config, manifest):
    store = open_built(config)
    tokens, begins, targets = (part[0] for part in store.read(np.array([0]), manifest.tokens))
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
            find_cache(chat_config(tmp_path, folder, path, format=format), "train")
    # what has no effect on chats is no part of it, and neither is what happens to long ones when they are read
    same = chat_config(tmp_path, folder, path, enforce_bos=True, format={"type": "chat", "too_long": "drop"})
    assert find_cache(same, "train").manifest is not None


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


def test_replies_that_the_template_does_not_write_are_counted(tmp_path):
    """A name in the template is misspelt, and tool calls are left out."""
    misspelt = PLAIN.replace("message.content", "(message.contnt or '')")
    folder = write_chat_tokenizer(tmp_path / "tokenizer", misspelt)
    path = write_chats(tmp_path / "chats.jsonl", [CONVERSATION] * 3)
    (shard,) = build_cache(chat_config(tmp_path, folder, path), "train").shards
    assert "a tool call or a tool of 3 of 3 documents" in shard.warnings[0]
    thoughts = [
        {**CONVERSATION[2], "reasoning_content": "Hm."},
        {**CONVERSATION[2], "content": "<think>Hm.</think>Me."},
    ]
    strip = PLAIN.replace("message.content", "message.content.split('</think>')[-1]")
    folder = write_chat_tokenizer(tmp_path / "strip", strip)
    path = write_chats(tmp_path / "thoughts.jsonl", [[CONVERSATION[1], reply] for reply in thoughts])
    (shard,) = build_cache(chat_config(tmp_path / "strip", folder, path), "train").shards
    assert ["reasoning of 2 of 2 documents" in text for text in shard.warnings] == [True]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "fetch_weather"}}]}
    reasoning = {"role": "assistant", "content": "<think>Hm.</think>\n\nThe robot."}
    reader = Conversations(
        template=find_template(str(write_chat_tokenizer(tmp_path / "t", PLAIN)), None, "x"),
        messages_field="messages",
        loss_on="last",
    )
    shown = [reader.read({"messages": [CONVERSATION[1], reply]}).is_written for reply in (reasoning, call)]
    assert shown == [True, False]


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "count", "arguments": {"of": "stars"}}}],
}
NAMES = "{{ messages[0].content }}{% for c in messages[1].tool_calls or [] %}{{ c.function.name }}{% endfor %}"
ONLY_CHAT = PLAIN.replace("in messages %}", "in messages if message.role in ['user', 'assistant'] %}")
GENERATION = "{% generation %}{{ messages[1].content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "messages", "counts"),
    [
        (PLAIN, [CONVERSATION[1], CONVERSATION[2]], {}),
        (PLAIN, [{"role": "user", "content": "Use count for stars."}, CALL], {"unwritten"}),
        (NAMES + "<|im_end|>", [CONVERSATION[1], CALL], {"unwritten"}),  # without the arguments
        (NAMES + "{{ messages[1].tool_calls[0].function.arguments | tojson }}<|im_end|>", [CONVERSATION[1], CALL], {}),
        (ONLY_CHAT, [CONVERSATION[1], {"role": "tool", "content": "37 degrees"}, CONVERSATION[2]], {"unwritten"}),
        (ONLY_CHAT, [CONVERSATION[1], {"role": "tool", "content": '{"t": 37}'}, CONVERSATION[2]], {"unwritten"}),
        (PLAIN, [CONVERSATION[1], CONVERSATION[2] | {"function_calls": "f(x=1)"}], {"unwritten"}),
        (PLAIN, [CONVERSATION[1] | {"functions": '[{"name": "count_all"}]'}, CONVERSATION[2]], {"unwritten"}),
        (PLAIN, [CONVERSATION[1] | {"context": "A passage."}, CONVERSATION[2]], {"unwritten"}),
        (PLAIN, [CONVERSATION[1], CONVERSATION[2] | {"reasoning_details": [{"text": "Hm"}]}], {"unreasoned"}),
        (f"{{{{ messages[0].content }}}}{GENERATION}<|im_end|>", [CONVERSATION[1], CONVERSATION[2]], {"endless"}),
        (f"{NAMES}stars{GENERATION}<|im_end|>", [CONVERSATION[1], CALL | {"content": "a"}], {"unmarked", "endless"}),
    ],
)
def test_what_is_not_learned_of_a_conversation_is_counted(tmp_path, template, messages, counts):
    folder = str(write_chat_tokenizer(tmp_path, template))
    on = "last" if "generation %}" in template or template is PLAIN else "all"
    document = Conversations(template=find_template(folder, None, "x"), messages_field="messages", loss_on=on).read(
        {"messages": messages}
    )
    batch = tokenize([document], load_tokenizer(folder), CHAT)
    assert {name for name in WARNINGS if getattr(batch, name)} == set(counts)


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


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            None,
            r"data.format.chat_template: .*tokenizer extend .* --chat_template chatml .*, or set it to a Jinja file$",
        ),
        (PLAIN.replace("<|im_end|>", "<|eot_id|>"), r"<\|eot_id\|>.*--special_tokens"),
    ],
)
def test_a_tokenizer_without_the_template_or_its_tokens_is_an_error_with_advice(tmp_path, template, reason):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", template)
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    with pytest.raises(UserError, match=reason):
        find_cache(config, "train")


def test_completions_are_targets_and_end_in_an_eos_token(folder):
    reader = dataclasses.replace(COMPLETIONS, separate_with=" -> ")
    tokenizer = load_tokenizer(folder)
    one = reader.read({"prompt": "the robot", "completion": "counts"})
    found = tokenize([one, one], tokenizer, COMPLETION)
    tokens, targets = found.tokens[: len(found.tokens) // 2], found.targets[: len(found.tokens) // 2]
    assert tokens[0] == tokenizer.bos_id
    assert tokens[-1] == tokenizer.eos_id
    (text,) = decoded(folder, tokens.tolist(), targets.tolist())
    assert text.lstrip().startswith("counts")
    assert targets[-1]
    assert not targets[0]
    assert tokenizer.backend.decode(tokens[1:-1].tolist()) == "the robot -> counts"


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"completion": "b"}, ["'prompt'", "data.format.input_field"]),
        ({"prompt": "a"}, ["'completion'", "data.format.output_field"]),
        ({"prompt": "a", "completion": 3}, ["'completion'"]),
        ({"prompt": "a", "completion": {"text": ["b"], "answer_start": [0]}}, ["'completion'"]),
        ({"prompt": "a", "completion": ""}, ["'completion'"]),
        ({"prompt": "a", "completion": "b", "system": "S"}, ["'system'"]),
        ({"prompt": "a", "completion": "b", "input": "c"}, ["'input'"]),
        ({"prompt": "Which?", "completion": "b", "choices": {"text": ["c", "d"]}}, ["'choices'"]),
        ({"prompt": "a", "completion": "b", "suffix": "c"}, ["'suffix'"]),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, ["'prompt'", "type: chat"]),
        ({"prompt": "a", "completion": '[{"role": "assistant", "content": "b"}]'}, ["'completion'"]),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "c"}]}, ["'tools'"]),
        ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, ["'history'"]),
        ({"prompt": "a", "completion": "b", "label": False}, ["'label'"]),
        ({"prompt": "a", "completion": "b", "loss_mask": [0, 1]}, ["'loss_mask'"]),
        ({"prompt": "a", "completion": "b", "Complex_CoT": "Hm."}, ["'Complex_CoT'"]),
        ({"prompt": "a", "completion": "b", "reasoning_content": "Hm."}, ["'reasoning_content'"]),
        ({"prompt": "a", "completion": "b", "chain_of_thought": "Hm."}, ["'chain_of_thought'"]),
        ({"prompt": "a", "completion": "b", "sql_context": "CREATE TABLE"}, ["'sql_context'"]),
        ({"prompt": "a", "completion": "b", "old_contents": "x = 1"}, ["'old_contents'"]),
        ({"prompt": "a", "completion": "b", "passages": ["A passage."]}, ["'passages'"]),
        ({"prompt": "Double it.", "completion": "42", "input": 21}, ["'input'"]),
        ({"prompt": "Capital?", "completion": "It is Paris.", "input": "Paris"}, ["'input'"]),
        ({"prompt": "a", "completion": "b", "messages": [{"role": "user", "content": "Before."}]}, ["'messages'"]),
    ],
)
def test_a_damaged_completion_is_an_error(record, names):
    with pytest.raises(BadRecordError) as caught:
        COMPLETIONS.read(record)
    assert all(name in str(caught.value) for name in names), caught.value


def test_keys_of_a_completion_that_change_nothing_are_accepted():
    record = {"prompt": "S a", "completion": "b", "system": "S", "label": True, "weight": 1, "tools": [], "id": 3}
    assert COMPLETIONS.read(record).text == "S ab"
    ignoring = dataclasses.replace(COMPLETIONS, ignored_fields=["input"])
    assert ignoring.read(record | {"input": "c"}).text == "S ab"


@pytest.mark.parametrize("separator", ["", "\n", " Answer: "])
def test_answers_that_repeat_their_prompt_are_an_error_if_most_do_and_counted_else(tmp_path, separator):
    rows = [("Who is it?", "Who is it? Me."), ("Hello", "Hello there."), ("The", "Then no."), ("", "x"), ("a", "b")]

    def reader(rows):
        lines = (json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows)
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        return DocumentReader(
            describe_source(str(tmp_path / "rows.jsonl")), dataclasses.replace(COMPLETIONS, separate_with=separator)
        )

    some = reader([rows[4], *rows])
    assert len(list(some)) == 6
    assert len(some.warnings) == 1
    assert "rows.jsonl:2: 2 of 6 " in some.warnings[0]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*in 2 of 3 records"):
        list(reader(rows[:3]))


def test_a_secret_among_the_variables_of_a_template_reaches_the_template_but_no_file(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "{{ api_key | length }}{{ messages[1].content }}")
    config = chat_config(tmp_path, folder, write_chats(tmp_path / "chats.jsonl", [CONVERSATION]))
    variables = {"api_key": "planted-secret"}
    secret = config.model_copy(
        update={"format": config.format.model_copy(update={"chat_template_kwargs": variables, "loss_on": "all"})}
    )
    manifest = build_cache(secret, "train")
    tokens = read_all(secret, manifest)[0]
    assert load_tokenizer(folder).backend.decode(tokens.tolist()).startswith("14")
    assert all(b"planted" not in path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert build_cache(secret, "train") == manifest
