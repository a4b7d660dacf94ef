"""Conversations in the shapes that people have."""

import json

import pyarrow
import pytest
from chat_tokenizer import write_chat_tokenizer
from pyarrow import parquet

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import find_template
from lmtrain.hf.find_tokenizer import open_in_transformers
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.instructions import Conversations
from lmtrain.preprocess.messages import read_messages
from lmtrain.preprocess.recipe import chat_template_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import BadRecordError
from lmtrain.preprocess.sources import describe_source

ASKED = [{"role": "user", "content": "Who counts?"}, {"role": "assistant", "content": "The robot."}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"messages": json.dumps(ASKED)},
        {"messages": [{**message, "name": None, "tool_calls": None} for message in ASKED]},
        {"messages": [{**m, "content": [{"type": "text", "text": part} for part in m["content"]]} for m in ASKED]},
        {"conversations": [{"from": "human", "value": "Who counts?"}, {"from": "gpt", "value": "The robot."}]},
        {"instruction": "Who counts?", "input": "", "output": "The robot.", "text": "ignored"},
        {"instruction": "Who counts?", "input": None, "output": "The robot.", "history": []},
    ],
)
def test_records_of_all_shapes_give_the_same_messages(record):
    assert read_messages(record, "messages") == ASKED


def test_roles_of_sharegpt_and_parts_of_alpaca():
    turns = [("system", "S"), ("human", "H"), ("gpt", "G"), ("observation", "O"), ("gpt", "E")]
    found = read_messages({"conversations": [{"from": who, "value": text} for who, text in turns]}, "messages")
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "assistant"]
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."}
    assert [m["content"] for m in read_messages(record, "messages")] == ["Be brief.", "Add.\n\n1 2", "3"]


def test_a_null_content_next_to_tool_calls_is_missing_for_the_template_as_in_transformers(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "count"}}]}
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls and m.tool_calls[0].function.name }}\n"
    )
    folder = str(write_chat_tokenizer(tmp_path, template + "{% endfor %}"))
    reader = Conversations(find_template(folder, None, "x"), "messages", "all")
    chat = [ASKED[0], call]
    text = reader.read({"messages": chat}).text
    assert text == open_in_transformers(folder).apply_chat_template(chat, tokenize=False)
    assert "None" not in text.splitlines()[1]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"other": 1}, "no key 'messages' (it has 'other'); set data.format.messages_field to the key"),
        ({"conversations": []}, "'conversations' is an empty list"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"prompt": "a", "completion": "b"}, "set data.format: {type: completion} to read prompts with completions"),
        ({"messages": [["user", "Hello"]]}, "message 1 is list"),
        ({"messages": [{"content": "Hello"}]}, "message 1 has no role"),
        ({"messages": [{"from": "dog", "value": "Hello"}]}, "message 1: unknown role 'dog'"),
        ({"messages": [{"role": "human", "content": "Hello"}]}, "message 1: unknown role 'human'; known are system"),
        ({"messages": [{"role": "user", "text": "a"}]}, "message 1 has no content (it has 'role', 'text')"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": ["Hello"]}]}, "message 1: content has a part of type 'str'"),
        ({"messages": [{"role": "user", "content": {"text": "Hello"}}]}, "message 1: content is dict"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2 (role assistant) is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 (role assistant) is empty"),
        ({"messages": [USER, *[{"role": "assistant", "content": "b"}] * 2]}, "messages 2 and 3 both have"),
        ({"messages": "Hello"}, "'messages' is text, but not JSON"),
        ({"messages": "[1"}, "'messages' is text, but not JSON: Expecting ',' delimiter: character 3"),
        ({"messages": "[" * 100_000}, "not JSON: nested too deeply"),
        ({"instruction": "Add.", "output": 3}, "'output' is int, not text"),
        ({"instruction": "Add.", "output": "3", "history": [["a", "b"]]}, "'history'"),
        ({"instruction": "Add.", "output": ""}, "message 2 (role assistant) is empty"),
    ],
)
def test_a_damaged_record_is_an_error(record, words):
    with pytest.raises(BadRecordError) as caught:
        read_messages(record, "messages")
    assert words in str(caught.value)


def test_other_shapes_are_not_read_if_the_field_is_set():
    record = {"conversations": [{"from": "human", "value": "H"}], "turns": ASKED}
    assert read_messages(record, "turns") == ASKED
    with pytest.raises(BadRecordError, match=r"no key 'chats' .*; set data.format.messages_field"):
        read_messages(record, "chats")


@pytest.mark.parametrize("format", [{"type": "text"}, {"type": "chat"}])
def test_a_table_of_sharegpt_is_read_or_names_the_format_to_set(tmp_path, format):
    path = tmp_path / "chats.parquet"
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The robot."}]
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 1, "conversations": turns}] * 3), path)
    config = DataConfig(tokenizer=str(write_chat_tokenizer(tmp_path / "tokenizer")), format=format)
    reader = DocumentReader(describe_source(str(path)), record_reader(config, 0, chat_template_of(config)))
    if format["type"] == "chat":
        assert [document.contents for _, document in reader] == [("Who?", "The robot.")] * 3
    else:
        with pytest.raises(UserError, match=r"chats\.parquet: no key 'text' .*set data.format: {type: chat} to read"):
            list(reader)
