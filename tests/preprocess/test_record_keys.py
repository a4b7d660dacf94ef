"""Records as people have them: nothing that changes what should be learned is passed over without a word."""

import json
from datetime import date
from decimal import Decimal

import pyarrow
import pytest
from chat_tokenizer import PLAIN, write_chat_tokenizer
from pyarrow import parquet

from lmtrain.data.config import DataConfig
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.recipe import chat_template_of
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import AnswerPair
from lmtrain.preprocess.sources import describe_source
from lmtrain.runtime.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), PLAIN))


@pytest.fixture
def read(folder, tmp_path):
    """`read(format, *records)`: the documents as (text, text of the targets), and the warnings."""

    def reading(format, *records, name="a.jsonl"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(records), path)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        config = DataConfig(tokenizer=folder, format=format)
        reader = DocumentReader(describe_source(str(path)), record_reader(config, 0, chat_template_of(config)))
        found = []
        for _, document in reader:
            for one in (document.chosen, document.rejected) if isinstance(document, AnswerPair) else (document,):
                targets = () if isinstance(one, str) else one.targets
                found.append((one, "".join(one.text[start:end] for start, end in targets)))
        return found, reader.warnings

    return reading


def user(text, **more):
    return {"role": "user", "content": text, **more}


def reply(text, **more):
    return {"role": "assistant", "content": text, **more}


def reply_of_tool(text):
    return {"role": "tool", "content": text}


def system(text):
    return {"role": "system", "content": text}


CHAT, PAIR = {"type": "chat"}, {"type": "preference"}
QA = {"type": "completion"}
NAMED = PAIR | {"chosen_field": "response_1", "rejected_field": "response_2"}
ANSWERS = {"prompt": "p ", "response_1": "g", "response_2": "b"}
CALL = {"name": "f", "arguments": {}}
THOUGHT = "It may be so, since they said it is."
THREAD = [user("q"), reply("mid"), user("r")]


@pytest.mark.parametrize(
    ("format", "record", "once", "targets"),
    [
        (CHAT, {"prompt": [user("q")], "completion": [user("q"), reply("a")]}, "q", ["a"]),
        (CHAT, {"prompt": THREAD, "completion": [*THREAD, reply("a")]}, "mid", ["a"]),
        (CHAT, {"prompt": [user("q")], "completion": [reply("a", weight=1)]}, "q", ["a"]),
        (CHAT, {"messages": [{"role": "system", "content": None}, user("q"), reply("a")]}, "q", ["a"]),
        (PAIR, {"prompt": [system("s"), user("q")], "chosen": [system("s "), user("q"), reply("g")],
                "rejected": [system("s "), user("q"), reply("b")]}, "q", ["g", "b"]),
        (PAIR, {"prompt": [user("q", id=1)], "chosen": [user("q", id=2), reply("g")],
                "rejected": [user("q", id=3), reply("b")]}, "q", ["g", "b"]),
        (PAIR, {"chosen": [user("q"), reply("mid", id=1), user("r"), reply("g")],
                "rejected": [user("q"), reply("mid", id=2), user("r"), reply("b")]}, "mid", ["g", "b"]),
        (PAIR, {"prompt": "", "chosen": "x: q good", "rejected": "x: q bad"}, "q", [" good", " bad"]),
        (PAIR, {"prompt": "", "chosen": "yes", "rejected": "no"}, "yes", ["yes", "no"]),
        (PAIR, {"prompt": [user("q")], "chosen": "g", "rejected": "b"}, "q", ["g", "b"]),
        (CHAT, {"prompt": [user("q")], "completion": "a"}, "q", ["a"]),
        (CHAT, {"prompt": "q", "completion": [reply("a")]}, "q", ["a"]),
        (CHAT, {"prompt": "q", "completion": '{"role": "assistant", "content": "a"}'}, "q", ["a"]),
        (CHAT, {"messages": [], "conversations": [user("q"), reply("a")]}, "q", ["a"]),
        (CHAT, {"messages": [system(" \n"), user("q"), reply("a")]}, "q", ["a"]),
        (CHAT, {"instruction": "Say what it is: q", "input": "Say what it is: q", "output": "a"}, "Say what", ["a"]),
        (CHAT, {"messages": [user("q"), reply("a")], "in_gsm8k_train": False}, "q", ["a"]),
        (QA, {"prompt": "Paris is  the\ncity. Q ", "context": "Paris is the city.", "completion": "a"}, "city", ["a"]),
        (CHAT, {"messages": [{"role": "Human", "content": "q"}, {"from": "model", "value": "a"}]}, "q", ["a"]),
    ],
)  # fmt: skip
def test_a_prompt_is_read_once_however_often_it_is_written(read, format, record, once, targets):
    found, _ = read(format, record)
    assert found[0][0].text.count(once) == 1
    assert [text.strip().removesuffix("<|im_end|>") for _, text in found] == [text.strip() for text in targets]


@pytest.mark.parametrize(
    ("format", "record", "named"),
    [
        (PAIR, {"prompt": [user("q")], "chosen": [system("s"), user("q"), reply("g")],
                "rejected": [system("s"), user("q"), reply("b")]}, "system"),
        (PAIR, {"prompt": "what is it?", "chosen": "\n\nHuman: what is it?\n\nAssistant: cat",
                "rejected": "\n\nHuman: what is it?\n\nAssistant: dog"}, "twice"),
        (QA, {"prompt": "what is it?", "completion": "[INST] what is it? [/INST] cat"}, "twice"),
        (QA | {"separate_with": "\n###\n"}, {"prompt": "what is it?", "completion": "what is it? A"}, "twice"),
        (CHAT, {"messages": [user("what is it now?"), reply("what is it now? cat")]}, "twice"),
        (CHAT, {"messages": [user("q"), reply("<think>R</think>a", reasoning_content="R")]}, "reasoning"),
        (CHAT, {"messages": [user("q"), reply(None, tool_calls=[{"name": "f", "args": {}}])]}, "'args'"),
        (PAIR, {"prompt": '["q1","q2"]', "chosen": '["a1","a2"]', "rejected": '["b1","b2"]'}, "'prompt'"),
        (QA, {"prompt": "from 1 to 100", "input": "10", "completion": "100"}, "'input'"),
        (QA, {"prompt": "p", "completion": "c", "thinking": False}, "'thinking'"),
        (QA, {"prompt": "p", "completion": "c", "context": "x", "persona": "y"}, "'context', 'persona'"),
        (QA, {"prompt": "p", "completion": "[{'role': 'assistant', 'content': 'a'}]"}, "JSON"),
        (CHAT, {"messages": [user("q"), reply("a")], "output": "other"}, "'output'"),
        (CHAT, {"prompt": [user("q"), reply("m", weight=1), user("r")], "completion": [reply("a")]}, "'prompt'"),
        (CHAT, {"messages": [system("<tools>[]</tools>"), user("q"), reply("a")], "tools": [{"name": "f"}]}, "'tools'"),
        (CHAT, {"messages": [user("q"), reply("<tool_call>{}</tool_call>", tool_calls=[CALL])]}, "'tool_calls'"),
        (CHAT, {"messages": [user("q"), reply("a")], "functions": [0, 1]}, "'functions'"),
        (PAIR, {"prompt": [system("s")], "chosen": [user("q"), reply("g")], "rejected": [user("r"), reply("b")]}, "u"),
        *((CHAT, {"messages": [user("q"), reply(text, tool_calls=[CALL])]}, "'tool_calls'") for text in (
            '[{"name": "f", "arguments": {}}]', "<function=f>{}</function>", "[f(a=1)]", "Action: f\nInput: {}")),
        *((CHAT, {"messages": [user("q"), reply(None, tool_calls=[call])]}, "arguments") for call in (
            CALL | {"arguments": 5}, {"function": CALL | {"arguments": ["a"]}}, {"function": "f"})),
        (CHAT, {"messages": [system('Use {"name": "f"}'), user("q"), reply("a")], "tools": [{"name": "f"}]}, "'tools'"),
        *((CHAT, {"messages": [user("q"), reply("a")], "prompt": value}, "'prompt'") for value in (
            ["In French.", "q"], user("In French."), {"text": "In French."}, 3)),
        *((CHAT, {"messages": [user("q"), reply(text, reasoning_content=THOUGHT)]}, "reasoning") for text in (
            f"{THOUGHT}\n\na", "<thinking>x</thinking>a", "<think>x\na")),
        (CHAT, {"messages": [user("q"), reply("a", reasoning_content="R</think>")]}, "reasoning"),
        (CHAT, {"messages": [user("q"), reply("a")], "reasoning": "off"}, "chat_template_kwargs"),
        *((CHAT, {"messages": messages}, "empty") for messages in (
            [user("q"), reply(" \n")], [user("q"), reply("\u200b")], [user("  "), reply("a")])),
        (QA, {"prompt": "p", "completion": " \n"}, "'completion'"),
        (CHAT, {"messages": [user('[{"type": "text", "text": "q"}]'), reply("a")]}, "JSON"),
        *((QA, {"prompt": asked, "completion": f"{before}{asked}\nNo."}, "twice") for asked, before in (
            ("what is\r\nit now?", ""), ("what is it, and how long has it been so?", "This is a task.\n### Task: "))),
        *((PAIR, {"chosen": f"\n\nHuman: {a}\n\nAssistant: Me.", "rejected": f"\n\nHuman: {b}\n\nAssistant:{c}"}, "an")
          for a, b, c in (("Who is it?", "Why?", " You."), ("Who?", "Who?", ""))),
        (PAIR, {"prompt": "p", "chosen": "r", "rejected": "r\n"}, "equal"),
        *((QA, {"prompt": "Name a sea.", "completion": f"{before}Name a sea. Red"}, "twice") for before in (
            "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n", "system\nBe kind.\nuser\n", "Do it.\n\n### Instruction:\n")),
        *((QA, {"prompt": "p", "completion": text}, "reasoning") for text in ("<think>So 7", "<think>So</think>\n\n")),
        *((CHAT, {"messages": [user("q"), reply(text)]}, "reasoning") for text in ("<think>So 7", "<think>So</think>")),
        (PAIR, {"prompt": "p", "chosen": '[{"type": "text", "text": "g"}]', "rejected": "b"}, "JSON"),
        (CHAT, {"conversations": [{"from": "human", "value": "raw", "content": "clean"}, reply("a")]}, "'value'"),
        (CHAT, {"messages": [user("q"), reply(None, tool_calls=[{"function": {"arguments": {}}}])]}, "name"),
        *((CHAT, {"instruction": "q", "input": own, "output": out}, "nan") for own, out in (("nan", "a"), ("", "nan"))),
        *((CHAT, {"messages": THREAD, name: value}, f"'{name}'") for name, value in (
            ("Response", "x"), ("ideal", ["x"]), ("message", reply("x")), ("chosen", {"from": "gpt", "value": "x"}))),
        *((QA, {"prompt": "p", "completion": "c", name: "old"}, f"'{name}'") for name in (
            "chat_history", "previous_messages", "source_documents", "model_reasoning", "option_a", "A", "ctx", "pdf")),
        *((NAMED, ANSWERS | {name: 2}, f"'{name}'") for name in ("preference", "preference_strength", "choice")),
        (NAMED, ANSWERS | {"label": 1}, "'label'"),
        *((CHAT, {"messages": [user("q"), reply("a", **{name: True})]}, f"'{name}'") for name in (
            "exclude_from_loss", "mask_loss", "skipped", "dont_train")),
        *((CHAT, {"messages": [user("q"), reply("a")], name: value}, f"'{name}'") for name, value in (
            ("label", "0"), ("skip", "1"), ("desirable", False))),
    ],
)  # fmt: skip
def test_what_would_change_what_is_learned_is_an_error_that_names_it(read, format, record, named):
    with pytest.raises(UserError, match=named):
        read(format, *[record] * 3)


OF_MESSAGES = ("name", "content.note", "parts", "keep", "status", "tool_calls.result")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_keys_that_are_not_read_are_named_in_one_warning_unless_they_are_ignored(read, name):
    records = [{"prompt": "p", "completion": "c", "id": 1, "notes": "n"}, {"prompt": "p", "completion": "c", "z": "x"}]
    [warning] = read(QA, *records, name=name)[1]
    assert ("'id'" in warning, "'notes'" in warning) == (True, True)
    ignored = QA | {"ignored_fields": ["id", "notes", "z"]}
    assert read(ignored, *records, name=name)[1] == []
    call = CALL | {"result": "sunny"}
    asked = [{"type": "text", "text": "q", "note": "lost"}]
    messages = [user(asked, name="Alice"), reply("a", parts=["lost"], keep=False, status="a", tool_calls=[call])]
    others = {"answer": "x", "label": "undesirable", "loss_mask": [[0, 1]], "no_think": True, "facts": {"a": 3}}
    [warning] = read(CHAT, {"messages": messages, **others})[1]
    assert all(f"'{key} of messages'" in warning for key in OF_MESSAGES)
    assert all(f"'{key}'" in warning for key in others)


def test_text_before_the_reasoning_that_the_template_drops_is_counted(read):
    template = "{% for m in messages %}{{ m.role }} {{ m.content.split('</think>')[-1].strip() }}\n{% endfor %}"
    for content, has_all in (("Well. <think>hm</think> A", False), ("A", True)):
        chat = {"messages": [user("q"), reply(content)]}
        [(document, _)], _ = read(CHAT | {"chat_template": template, "loss_on": "all"}, chat)
        assert document.has_reasoning == has_all


def test_texts_next_to_instructions_are_named_once(read):
    [_, _], [warning] = read({"type": "text"}, *[{"text": "t", "messages": [user("q")], "url": "u"}] * 2)
    assert ("'messages'" in warning, "'url'" in warning) == (True, False)


def test_values_of_other_types_are_not_passed_over(read):
    for more in ({"input": date(2020, 1, 1)}, {"context": b"A passage."}, {"choices": [Decimal(3)]}):
        with pytest.raises(UserError, match=f"'{next(iter(more))}'"):
            read(CHAT, {"messages": [user("q"), reply("a")], **more}, name="a.parquet")
        [(document, _)], _ = read(CHAT, {"messages": [user("q", **more), reply("a")]}, name="a.parquet")
        assert not document.is_written
    for more in ({"reasoning": "It is big."}, {"tools": "f(a: int)"}):
        [(document, _)], _ = read(CHAT, {"messages": [user("q", **more), reply("a")]})
        assert not (document.is_written and document.has_reasoning)


def test_arguments_of_arrow_are_a_map(read):
    calls = [{"name": "f", "arguments": [["a", "1"]]}, {"name": "g"}]
    template = "{% for m in messages %}{{ m.tool_calls | default('') }}{{ m.content }}{% endfor %}"
    chat = {"messages": [user("q"), reply(None, tool_calls=calls), reply_of_tool("b")]}
    [(document, _)], _ = read(CHAT | {"chat_template": template, "loss_on": "all"}, chat)
    assert "'arguments': {'a': '1'}" in document.text
    assert "'g', 'arguments': {}" in document.text


def test_answers_may_differ_in_their_reasoning_alone(read, tmp_path):
    (tmp_path / "thinks.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') + m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answers = {name: [user("q"), reply("r", reasoning_content=name)] for name in ("chosen", "rejected")}
    found, _ = read(PAIR | {"chat_template": str(tmp_path / "thinks.jinja")}, answers)
    assert [text for _, text in found] == ["chosenr<|im_end|>", "rejectedr<|im_end|>"]


def test_a_message_that_the_template_writes_as_a_reply_is_an_error(read, tmp_path):
    (tmp_path / "gemma.jinja").write_text(
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role + '\n' }}"
        "{{ (s + '\n') if loop.first and s }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = {"messages": [system("Be as brief as possible."), reply("Hello."), user("q"), reply("a")]}
    with pytest.raises(UserError, match="message 1 "):
        read(CHAT | {"chat_template": str(tmp_path / "gemma.jinja")}, chat)


def test_a_call_as_a_message_is_a_call(read):
    turns = [
        ("human", "q"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "42"),
        ("gpt", "a"),
    ]
    chat = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    template = "{% for m in messages %}{{ m.role }} {{ m.tool_calls | default('') }} {{ m.content }}\n{% endfor %}"
    [(document, _)], _ = read(CHAT | {"chat_template": template, "loss_on": "all"}, chat)
    assert "'arguments': {'a': 1}" in document.text
    assert "tool  42" in document.text


@pytest.mark.parametrize("result", ['{"result": 17}', "ok", "[]"])
def test_a_result_that_the_template_drops_is_not_found_in_other_messages(read, result):
    template = (
        "{% for m in messages %}{% if m.role != 'function' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    called = {"role": "function", "name": "f", "content": result}
    chat = {"messages": [user("Is it ok?"), reply("call f"), called, reply(f"It said {result}")]}
    [(document, _)], _ = read(CHAT | {"chat_template": template, "loss_on": "all"}, chat)
    assert not document.is_written


def test_a_tag_that_the_template_writes_around_itself_is_counted(read):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    for content, is_written in (("<user>q</user>", False), ("q <user><user>", True), ("q", True)):
        chat = {"messages": [user(content), reply("a")]}
        [(document, _)], _ = read(CHAT | {"chat_template": template, "loss_on": "all"}, chat)
        assert document.is_written == is_written
