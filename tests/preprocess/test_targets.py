"""Targets of conversations: a template without marks has those that it would mark."""

import pytest
from chat_templates import MARKED, without_marks

from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.preprocess.instructions import Conversations
from lmtrain.preprocess.records import BadRecordError

TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TOOLS = [{"type": "function", "function": {"name": "count", "description": "<|im_start|>assistant\n, <|assistant|>"}}]
ASK, REPLY = {"role": "user", "content": "Who counts?"}, {"role": "assistant", "content": "The robot."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "count", "arguments": {"n": 1}}}]}
RESULT = {"role": "tool", "content": "7"}
THINKING = {"role": "assistant", "content": "Nobody.", "reasoning_content": "Stars are many."}
CONVERSATIONS = {
    "question first": [ASK, REPLY, ASK, REPLY],
    "system": [SYSTEM, ASK, REPLY],
    "assistant first": [REPLY, ASK, REPLY],
    "assistant alone": [REPLY],
    "system, then assistant": [SYSTEM, REPLY, ASK, REPLY],
    "tool calls": [ASK, CALL, RESULT, REPLY],
    "tool call first": [CALL, RESULT, REPLY],
    "reasoning at the end": [ASK, REPLY, ASK, THINKING],
    "reasoning first": [THINKING, ASK, REPLY],
}


def targets(template, messages, tools, loss_on="assistant"):
    """The text and the parts of it that are targets, or the reason of the refusal."""
    reader = Conversations(template=ChatTemplate(template, TOKENS), messages_field="messages", loss_on=loss_on)
    try:
        read = reader.read({"messages": messages, "tools": tools})
    except BadRecordError as error:
        return str(error)
    spans = []
    for start, end in read.targets:  # a template may mark two parts without anything in between
        spans = [*spans[:-1], (spans[-1][0], end)] if spans and spans[-1][1] == start else [*spans, (start, end)]
    return read.text, [read.text[start:end] for start, end in spans], spans


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", MARKED)
def test_a_template_without_marks_has_the_targets_that_it_would_mark(name, tools):
    for kind, messages in CONVERSATIONS.items():
        for loss_on in ("assistant", "last"):
            expected = targets(MARKED[name], messages, tools, loss_on)
            found = targets(without_marks(MARKED[name]), messages, tools, loss_on)
            earlier = [message for message in messages[1:-1] if message["role"] == "assistant"]
            if name == "reasoning of the last message only" and loss_on == "assistant" and earlier:
                assert "rewrites it" in found, kind  # an earlier reply loses its <think></think>
                continue
            assert found == expected, kind


def test_targets_of_a_first_message_of_the_assistant_leave_out_tools_and_system_text():
    text, parts, _ = targets(without_marks(MARKED["default system text and tools"]), [REPLY, ASK, REPLY], TOOLS)
    assert text.startswith("<|im_start|>system\nYou are Qwen.\n# Tools\n")
    assert parts == ["The robot.<|im_end|>\n"] * 2


def test_a_template_that_hides_where_a_first_message_starts_is_an_error():
    hidden = "{% for m in messages %}{{ m.content if loop.first else '[' + m.content + ']' }}{% endfor %}"
    assert "does not show where a first message of the assistant starts" in targets(hidden, [REPLY, ASK], None)


@pytest.mark.parametrize("messages", [[ASK, THINKING], [ASK, REPLY, ASK, THINKING], [THINKING]])
def test_a_last_reply_in_several_marked_parts_is_a_target_in_full(messages):
    two_parts = MARKED["zephyr"].replace(
        "{% generation %}",
        "{% generation %}{{ m.reasoning_content or 'none' }}{% endgeneration %}{{ '|' }}{% generation %}",
    )
    _, parts, _ = targets(two_parts, messages, None, "last")
    assert parts == ["Stars are many.", "Nobody.</s>\n"]


def test_the_last_reply_of_a_template_that_rewrites_earlier_messages_is_an_error_where_it_is_ambiguous():
    shortened = MARKED["zephyr"].replace("{{ m.content + eos", "{{ (m.content if messages | length < 4 else '') + eos")
    assert "message 3: the chat template rewrites it" in targets(shortened, [ASK, REPLY, ASK, REPLY], None, "last")
