"""Conversations in the shapes that people have."""

import json

import pyarrow
import pytest
from chat_tokenizer import write_chat_tokenizer
from pyarrow import parquet

from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import find_template
from lmtrain.hf.find_tokenizer import open_in_transformers
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.instructions import Conversations
from lmtrain.preprocess.messages import read_conversation
from lmtrain.preprocess.recipe import chat_template_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import BadRecordError
from lmtrain.preprocess.sources import describe_source
from lmtrain.runtime.errors import UserError

ASKED = [{"role": "user", "content": "Who counts?"}, {"role": "assistant", "content": "The robot."}]


def read_messages(record, field, **settings):
    return read_conversation(record, field, **settings).messages


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


CALL = {"name": "count", "arguments": "{}"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED, "system": "S"},
        {"messages": ASKED, "system_prompt": "S", "system": None},
        {"conversations": ASKED, "system": "S", "system_message": "S"},
        {"messages": [{"role": "system", "content": "S"}, *ASKED], "system": " S"},
        {"instruction": "Who counts?", "output": "The robot.", "system_prompt": "S"},
        {"messages": ASKED, "system": "S", "weight": 1, "training": "sft", "loss": None, "score": 0.5},
        {"messages": ASKED, "system": "S", "prompt": "Who counts?", "history": []},
        {"messages": ASKED, "system": "S", "prompt": "<|user|>Human: Who counts?\n\nAssistant:", "context": "counts"},
        {"messages": ASKED, "system": "S", "train_id": 17, "language_label": 3, "is_masked": False, "answer": "B"},
        {"messages": ASKED, "system": "S", "prompt": [ASKED[0]], "tools": "", "functions": []},
    ],
)
def test_a_system_text_next_to_the_messages_is_the_first_message(record):
    assert read_messages(record, "messages") == [{"role": "system", "content": "S"}, *ASKED]


def test_functions_and_function_calls_are_tools_and_calls_of_tools():
    record = {
        "messages": [ASKED[0], {"role": "assistant", "content": None, "function_call": CALL}],
        "functions": [CALL],
    }
    found = read_conversation(record, "messages")
    call = {"name": "count", "arguments": {}}
    assert found.messages[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    assert found.tools == [{"type": "function", "function": CALL}]
    assert read_conversation({"messages": ASKED, "tools": [json.dumps(CALL)]}, "messages").tools == [CALL]


@pytest.mark.parametrize(
    ("calls", "arguments"),
    [
        ([{"function": {"name": "a", "arguments": '{"city": "Oslo"}'}}], {"city": "Oslo"}),  # as OpenAI writes them
        ([{"function": {"name": "a", "arguments": {"city": "Oslo"}}}], {"city": "Oslo"}),
        ('[{"function": {"name": "a", "arguments": ""}}]', {}),
    ],
)
def test_arguments_of_calls_are_maps(calls, arguments):
    (_, found) = read_messages({"messages": [ASKED[0], {"role": "assistant", "tool_calls": calls}]}, "messages")
    assert found["tool_calls"][0]["function"]["arguments"] == arguments


def test_messages_of_a_prompt_and_its_completion_are_a_conversation_whose_prompt_is_no_target():
    record = {"prompt": [*ASKED, ASKED[0]], "completion": [ASKED[1]], "system": "S"}
    found = read_conversation(record, "messages")
    assert [message["role"] for message in found.messages] == ["system", *["user", "assistant"] * 2]
    assert found.marks == [None, None, False, None, None]


def test_an_empty_system_message_is_none_and_an_empty_result_of_a_tool_is_one():
    tool = {"role": "tool", "content": ""}
    record = {"messages": [{"role": "system", "content": ""}, ASKED[0], {**ASKED[1], "tool_calls": []}, tool]}
    assert read_messages(record, "messages") == [*ASKED, tool]


def with_key(**more):
    return [ASKED[0], {**ASKED[1], **more}]


@pytest.mark.parametrize(
    ("more", "marks"),
    [
        ({"weight": 0}, [None, False]),
        ({"weight": 1.0, "train": None}, [None, True]),
        ({"train": False, "loss": False}, [None, False]),
        ({"training": True}, [None, True]),
        ({"label": "good", "trained_by": "x", "maskot": 1}, [None, None]),
    ],
)
def test_marks_of_messages_say_what_is_a_target(more, marks):
    found = read_conversation({"messages": with_key(**more)}, "messages")
    assert found.marks == marks
    assert not {"weight", "train", "training", "loss"} & found.messages[1].keys()


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"messages": with_key(weight=0.5)}, ["message 2", "'weight'"]),
        ({"messages": with_key(train="no")}, ["message 2", "'train'"]),
        ({"messages": with_key(train=True, weight=0)}, ["message 2", "'weight'", "'train'"]),
        ({"messages": with_key(lossWeight=0)}, ["message 2", "'lossWeight'"]),
        ({"messages": with_key(is_masked=True)}, ["message 2", "'is_masked'"]),
        ({"messages": with_key(mask=1)}, ["message 2", "'mask'"]),
        ({"messages": with_key(loss_mask=[1, 0])}, ["message 2", "'loss_mask'"]),
        ({"messages": with_key(train_detail=[{"begin_offset": 0}])}, ["message 2", "'train_detail'"]),
        ({"messages": with_key(prefix=True)}, ["message 2", "'prefix'"]),
        ({"messages": with_key(content=[{"type": "text", "text": "a", "weight": 0}])}, ["message 2", "part"]),
        ({"messages": ASKED, "weight": 0}, ["'weight'"]),
        ({"messages": ASKED, "train_on_inputs": False}, ["'train_on_inputs'"]),
        ({"messages": ASKED, "mask": "User"}, ["'mask'"]),
        ({"messages": ASKED, "label": False}, ["'label'"]),
        ({"messages": ASKED, "images": ["a.png"]}, ["'images'", "text"]),
        ({"messages": ASKED, "history": [["a", "b"]]}, ["'history'"]),
        ({"messages": ASKED, "documents": [{"text": "a"}]}, ["'documents'", "chat_template_kwargs"]),
        ({"messages": [{"role": "system", "content": "T"}, *ASKED], "system": "S"}, ["system"]),
        ({"messages": ASKED, "system": "S", "system_prompt": "T"}, ["'system'", "'system_prompt'"]),
        ({"messages": ASKED, "system": ["S"]}, ["'system'"]),
        ({"messages": ASKED, "prompt": "You are a pirate."}, ["'prompt'"]),
        ({"messages": ASKED, "prompt": "Context: a passage.\nWho counts?"}, ["'prompt'"]),
        ({"messages": ASKED, "context": "A long passage."}, ["'context'"]),
        ({"instruction": "Who?", "output": "Me.", "context": "A passage."}, ["'context'"]),
        ({"messages": ASKED, "complex_cot": "Hm."}, ["'complex_cot'"]),
        ({"messages": ASKED[:1], "response": "The robot."}, ["'response'", "reply"]),
        ({"messages": ASKED, "kto_tag": False}, ["'kto_tag'"]),
        ({"messages": with_key(loss_mask=0)}, ["message 2", "'loss_mask'"]),
        ({"messages": with_key(train_mask=False)}, ["message 2", "'train_mask'"]),
        ({"messages": with_key(loss_masked=True)}, ["message 2", "'loss_masked'"]),
        ({"messages": with_key(is_train="no")}, ["message 2", "'is_train'"]),
        ({"messages": with_key(include=False)}, ["message 2", "'include'"]),
        ({"messages": with_key(value="Another.")}, ["message 2", "'value'"]),
        ({"messages": with_key(**{"from": "gpt"})}, ["message 2", "'role'", "'from'"]),
        ({"messages": ASKED, "train_turns": [1]}, ["'train_turns'"]),
        ({"messages": ASKED, "systemInstruction": "S"}, ["'systemInstruction'"]),
        ({"messages": ASKED, "System Prompt": "S"}, ["'System Prompt'"]),
        ({"messages": ASKED, "preamble": "S"}, ["'preamble'"]),
        ({"messages": ASKED, "image_url": "a.png"}, ["'image_url'", "text"]),
        ({"messages": ASKED, "enable_thinking": False}, ["'enable_thinking'", "chat_template_kwargs"]),
        ({"instruction": "I", "output": "O", "Input": "X"}, ["'Input'"]),
        ({"instruction": "I", "output": "O", "definition": "D"}, ["'definition'"]),
        ({"messages": ASKED, "prompt": "The robot."}, ["'prompt'"]),
        ({"messages": ASKED, "question": "The robot."}, ["'question'"]),
        ({"messages": ASKED, "conversations": [{"from": "human", "value": "Else?"}]}, ["'conversations'"]),
        ({"messages": ASKED, "completion": "Another."}, ["'completion'"]),
        ({"messages": [ASKED[0], {"role": "assistant", "refusal": "No."}]}, ["message 2", "'refusal'"]),
        ({"messages": ASKED, "only_last_turn_loss": True}, ["'only_last_turn_loss'"]),
        ({"messages": with_key(skip=True)}, ["message 2", "'skip'"]),
        ({"messages": with_key(learn=False)}, ["message 2", "'learn'"]),
        ({"messages": with_key(tool_call={"name": "a"})}, ["message 2", "'tool_call'", "tool_calls"]),
        ({"messages": with_key(tool_calls=[{"name": "a", "arguments": "{"}])}, ["message 2", "arguments", "JSON"]),
        ({"messages": with_key(tool_calls={"name": "a"})}, ["message 2", "'tool_calls'"]),
        ({"messages": ASKED, "prompt": [{"role": "system", "content": "S"}]}, ["'prompt'"]),
        ({"messages": ASKED, "tools": {"name": "a"}}, ["'tools'"]),
        ({"messages": ASKED, "tools": ["count"]}, ["'tools'", "not JSON"]),
        ({"messages": ASKED, "tools": [CALL], "functions": [CALL]}, ["'tools'", "'functions'"]),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, ["'chat_template_kwargs'"]),
        ({"messages": [{"from": ["human"], "value": "a"}]}, ["message 1"]),
        ({"messages": [{**ASKED[0], "function_call": CALL, "tool_calls": [CALL]}]}, ["function_call and tool_calls"]),
    ],
)
def test_a_key_that_changes_what_is_learned_is_never_passed_over(record, names):
    with pytest.raises(BadRecordError) as caught:
        read_messages(record, "messages")
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize(
    "more",
    [
        {"context_length": 4096, "system_id": "A", "document_title": "A", "step_loss_mask": 1, "prefix": False},
        {"conversations": None, "Question": "Who counts?", "rationale": "robot", "input": "counts"},
        {"conversations": [{"from": "human", "value": "Who counts?"}], "has_image": False, "image_id": "7"},
    ],
)
def test_keys_that_change_nothing_are_accepted(more):
    assert read_messages({"messages": ASKED, **more}, "messages") == ASKED


def test_a_column_of_messages_without_a_value_is_absent():
    record = {"messages": None, "conversations": [{"from": "human", "value": "H"}, {"from": "gpt", "value": "G"}]}
    assert [message["content"] for message in read_messages(record, "messages")] == ["H", "G"]


def test_the_result_of_an_older_function_call_is_that_of_a_tool():
    call = {"role": "assistant", "content": None, "function_call": {"name": "count", "arguments": "{}"}}
    result = {"role": "function", "name": "count", "content": "7"}
    found = read_messages({"messages": [ASKED[0], call, result]}, "messages")
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]
    assert read_messages({"messages": [ASKED[0], result]}, "messages")[1]["role"] == "function"


def test_ignored_fields_are_not_read_in_records_and_in_messages():
    record = {"messages": with_key(weight=0.5), "weight": 3.0, "system": "S"}
    found = read_conversation(record, "messages", ["weight", "system"])
    assert (found.messages, found.marks) == (ASKED, [None, None])


def test_a_null_content_next_to_tool_calls_is_missing_for_the_template_as_in_transformers(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "count"}}]}
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls and m.tool_calls[0].function.name }}\n"
    )
    folder = str(write_chat_tokenizer(tmp_path, template + "{% endfor %}"))
    reader = Conversations(template=find_template(folder, None, "x"), messages_field="messages", loss_on="all")
    chat = [ASKED[0], call]
    text = reader.read({"messages": chat}).text
    assert text == open_in_transformers(folder).apply_chat_template(chat, tokenize=False)
    assert "None" not in text.splitlines()[1]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"other": 1}, ["'messages'", "'other'", "data.format.messages_field"]),
        ({"conversations": []}, ["'conversations'"]),
        ({"messages": []}, ["'messages'"]),
        ({"prompt": "a", "completion": "b"}, ["data.format: {type: completion}"]),
        ({"messages": [["user", "Hello"]]}, ["message 1"]),
        ({"messages": [{"content": "Hello"}]}, ["message 1"]),
        ({"messages": [{"from": "dog", "value": "Hello"}]}, ["message 1", "'dog'"]),
        ({"messages": [{"role": "user", "text": "a"}]}, ["message 1", "'role'"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["'image_url'"]),
        ({"messages": [{"role": "user", "content": ["Hello"]}]}, ["message 1", "'str'"]),
        ({"messages": [{"role": "user", "content": {"text": "Hello"}}]}, ["message 1"]),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, ["message 2"]),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, ["message 2"]),
        ({"messages": [USER, *[{"role": "assistant", "content": "b"}] * 2]}, ["messages 2 and 3"]),
        ({"messages": "Hello"}, ["'messages'"]),
        ({"messages": "[1"}, ["'messages'"]),
        ({"messages": "[" * 100_000}, ["not JSON: nested too deeply"]),
        ({"instruction": "Add.", "output": 3}, ["'output'"]),
        ({"instruction": "Add.", "output": "3", "history": [["a", "b"]]}, ["'history'"]),
        ({"instruction": "Add.", "output": ""}, ["message 2"]),
    ],
)
def test_a_damaged_record_is_an_error(record, names):
    with pytest.raises(BadRecordError) as caught:
        read_messages(record, "messages")
    assert all(name in str(caught.value) for name in names), caught.value


def test_other_shapes_are_not_read_if_the_field_is_set():
    record = {"conversations": [{"from": "human", "value": "H"}], "turns": ASKED}
    assert read_messages(record, "turns") == ASKED
    with pytest.raises(BadRecordError, match=r"'chats' .*data.format.messages_field"):
        read_messages(record, "chats")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_nulls_that_a_table_adds_are_no_part_of_calls_and_tools(tmp_path, kind):
    """A key of one row is a null in all others."""
    rows = []
    for name, argument in (("weather", "city"), ("time", "zone")):
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "X"}}}
        chat = [{"role": "user", "content": "w"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"messages": chat, "tools": [{"name": name, "parameters": {argument: {"type": "string"}}}]})
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "calls.parquet")
    else:
        with pyarrow.ipc.new_stream(str(tmp_path / "calls.arrow"), table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    config = DataConfig(
        tokenizer=str(write_chat_tokenizer(tmp_path / "tokenizer", template)), format={"type": "chat", "loss_on": "all"}
    )

    def texts(name):
        reader = record_reader(config, 0, chat_template_of(config))
        # a table does not keep the order of keys
        parts = (json.JSONDecoder().raw_decode(doc.text)[0] for _, doc in DocumentReader(describe_source(name), reader))
        return [*parts, [len(doc.text) for _, doc in DocumentReader(describe_source(name), reader)]]

    assert texts(str(tmp_path / f"calls.{kind}")) == texts(str(tmp_path / "calls.jsonl"))


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
        with pytest.raises(UserError, match=r"chats\.parquet: .*'text' .*data.format: {type: chat}"):
            list(reader)
