"""Conversations from records of any common shape.

    {"messages": [{"role": "user", "content": "..."}, ...]}           OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca
    {"prompt": [messages], "completion": [messages]}                  TRL; the messages of the prompt are no targets

The last three are recognized if a record has no key `messages` and `messages_field` has its default.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from lmtrain.data.formats import ChatFormat
from lmtrain.preprocess.record_keys import (
    CONTEXT,
    FUNCTIONS,
    MARKS,
    SYSTEM,
    TOOLS,
    VARIABLES,
    calls_of,
    is_blank,
    is_inside,
    is_reply,
    mark_of,
    may_matter,
    names_all,
    parsed,
    refuse_context,
    refuse_others,
    refuse_others_of,
    system_text,
    tools_of,
    variables_of,
    without,
)
from lmtrain.preprocess.records import (
    COMPLETION,
    PREFERENCE,
    READ_COMPLETIONS,
    READ_PREFERENCES,
    BadRecordError,
    checked_text,
    listed_keys,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT = "assistant"
# Keys of a message that hold what the model thinks before its reply.
REASONING = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought", "reasoning_details")
# Between what a model thinks and its reply, where both are in its content.
END_OF_THINKING = "</think>"
_SYSTEM_ROLES = ("system", "developer")
_OPENAI: str = ChatFormat.model_fields["messages_field"].default
SHAREGPT = "conversations"
# Keys of conversations, some of which stand next to texts that were made of them.
CONVERSATIONS = (_OPENAI, SHAREGPT)
_INSTRUCTION, _INPUT, _OUTPUT, _HISTORY = "instruction", "input", "output", "history"
_ALPACA = (_INSTRUCTION, _INPUT, _OUTPUT)
_PROMPT, _COMPLETION = "prompt", "completion"
# Texts that were made of messages have some of these words, and no others, between theirs.
_MARKUP = {"a", "ai", "answer", "assistant", "bot", "gpt", "human", "input", "instruction", "prompter", "q", "question"}
_MARKUP |= {"response", "system", "user", "prompt", "query", "problem", "task"}
_TAG, _WORD = re.compile(r"<[^<>]*>|\[/?[A-Z]+\]|#+"), re.compile(r"\w+")
# Messages as text of Python, such as pandas writes into CSV.
_REPR = re.compile(r"\s*\[?\s*\{'(role|from|content|value)'")
# Parts of a content as JSON text.
_PARTS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](type|text|image_url)["']\s*:""")
# Missing values as text.
_MISSING = ("nan", "NaN", "<NA>")
# Where a content starts to think; some models have other tags.
_THINKING = re.compile(r"</?(think|thinking|reasoning)>|<\|?/?begin_of_thought\|?>")
# A shorter text may well stand in another one.
_WORDS_OF_INPUT, _WORDS_OF_REASONING = 4, 8
# Keys of a part of a content that are read.
_OF_PARTS = ("type", "text", *MARKS)
# Other names of roles.
_FROM = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT, "observation": "tool"}
# A call of a tool as a message, of LLaMA-Factory and others: its content is the call as JSON.
_CALL = "function_call"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as templates expect them: `role`, and `content` as text. `marks` says of each message whether it is a
    target, None: by its role. `tools` and `variables` reach the template, too."""

    messages: list[dict[str, Any]]
    marks: list[bool | None]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Conversation") -> "Conversation":
        """The messages of both, which must not be two of the assistant in a row."""
        joined = Conversation(
            messages=self.messages + other.messages,
            marks=self.marks + other.marks,
            tools=self.tools,
            variables=self.variables,
        )
        _check_turns(joined.messages)
        return joined

    def after(self, number: int) -> "Conversation":
        """Without the first messages."""
        return replace(self, messages=self.messages[number:], marks=self.marks[number:])

    def with_system(self, text: str) -> "Conversation":
        """With this system message, unless it is there. Raises `BadRecordError` if there is another one."""
        if not text:
            return self
        if self.messages and self.messages[0]["role"] in _SYSTEM_ROLES:
            if self.messages[0].get("content", "").strip() == text.strip():
                return self
            raise BadRecordError("a system text next to the messages, and another one among them; keep one of them")
        first = {"role": "system", "content": text}
        return Conversation(
            messages=[first, *self.messages], marks=[None, *self.marks], tools=self.tools, variables=self.variables
        )


def reads_key(name: str, messages_field: str) -> bool:
    """Whether a key of a record is read: one of the messages, or one that changes what is learned."""
    shapes = (*CONVERSATIONS, *_ALPACA, _PROMPT, _COMPLETION, "response") if messages_field == _OPENAI else ()
    return name == messages_field or name in shapes or may_matter(name)


def find_key(keys: Collection[str], messages_field: str) -> str:
    """The key of the messages in records with these `keys`; that of the instruction in Alpaca's shape.

    Raises `BadRecordError` if there is none.
    """
    if messages_field in keys:
        return messages_field
    if messages_field == _OPENAI and SHAREGPT in keys:
        return SHAREGPT
    if messages_field == _OPENAI and {_INSTRUCTION, _OUTPUT} <= set(keys):
        return _INSTRUCTION
    if messages_field == _OPENAI and set(keys) >= COMPLETION:
        return _PROMPT
    setting = (
        "data.format.messages_field to the key of the messages, or data.format: {type: completion, input_field: ..., "
        "output_field: ...} to read texts"
    )
    for shape, other in ((COMPLETION, READ_COMPLETIONS), (PREFERENCE, READ_PREFERENCES)):
        setting = other if set(keys) >= shape else setting
    setting += " (for plain texts remove data.format)" if set(keys) == {"text"} else ""
    raise BadRecordError(f"no key {messages_field!r} (it has {listed_keys(keys)}); set {setting}")


def read_conversation(record: Mapping[str, Any], messages_field: str, ignored: Collection[str] = ()) -> Conversation:
    """The conversation of a record without its `ignored` keys, nor those in its messages.

    Raises `BadRecordError` if it cannot be read, or has a key that changes what should be learned and is not supported.
    """
    record = without(record, ignored)
    key = find_key([name for name, value in record.items() if value not in (None, [])] or record, messages_field)
    read = {key, *CONTEXT, *SYSTEM, TOOLS, FUNCTIONS, VARIABLES}
    refuse_others(record, read)
    own: tuple[str, ...] = (key, _PROMPT) if key != _PROMPT else (_PROMPT, _COMPLETION)
    if key == _INSTRUCTION:
        found, own = check_messages(_from_alpaca(record), key, ignored), _ALPACA
    elif key == _PROMPT != messages_field:
        found = _from_completion(record, ignored)
    else:
        found = check_messages(parsed(record[key], key), key, ignored)
        check_prompt(record.get(_PROMPT) if key != _PROMPT else None, found.messages, _PROMPT)
        _check_reply(record, found.messages, read)
    asked, replies = texts_by_role(found.messages)
    refuse_context(record, (*SYSTEM, TOOLS, FUNCTIONS, VARIABLES, *own), asked, replies)
    if messages_field == _OPENAI:
        refuse_others_of(record, (*CONVERSATIONS, _COMPLETION, "response", _OUTPUT), own, asked + replies)
    found = Conversation(
        messages=found.messages, marks=found.marks, tools=tools_of(record), variables=variables_of(record)
    )
    if found.tools and any("<tools>" in text or names_all(text, found.tools) for text in asked):
        raise BadRecordError(
            f"the messages have tools, and the record has some under {TOOLS!r}, so that both would be written; keep "
            f"one of them, or add {TOOLS!r} to data.format.ignored_fields"
        )
    return found.with_system(system_text(record))


def texts_by_role(messages: Collection[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The contents of the messages that ask, and of those of the assistant."""
    contents = [(message["role"] == ASSISTANT, str(message.get("content", ""))) for message in messages]
    return [text for is_reply, text in contents if not is_reply], [text for is_reply, text in contents if is_reply]


def as_messages(value: Any) -> Any:
    """A value that may be messages: a single one becomes a list of one, and JSON text of messages is parsed."""
    if isinstance(value, str) and _REPR.match(value):
        raise BadRecordError("messages as Python writes them, in single quotes, are not read; write them as JSON")
    if isinstance(value, str) and value.lstrip().startswith(("[{", '{"role"', '{"from"')):
        try:
            found = parsed(value, "")
        except BadRecordError:
            return value  # a text
        found = [found] if isinstance(found, dict) else found
        is_list = isinstance(found, list) and all(
            isinstance(part, dict) and {"role", "from"} & part.keys() for part in found
        )
        return found if is_list else value
    return [value] if isinstance(value, dict) else value


def conversations_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a record under the keys of conversations, as messages where they are some."""
    return {name: as_messages(record[name]) for name in CONVERSATIONS if record.get(name)}


def are_messages(value: Any) -> bool:
    """Whether a value is one message, or a list that has some."""
    listed = as_messages(value)
    return isinstance(listed, list) and any(
        isinstance(part, dict) and {"role", "from"} & part.keys() for part in listed
    )


def check_messages(listed: Any, key: str, ignored: Collection[str] = ()) -> Conversation:
    """The messages of a list under `key`. Raises `BadRecordError` if it is none."""
    if not isinstance(listed, list) or not listed:
        what = "an empty list" if listed == [] else type(listed).__name__
        raise BadRecordError(f"{key!r} is {what}, not a list of messages")
    messages, marks, has_old_calls = [], [], False
    for number, message in enumerate(listed, start=1):
        place = f"message {number}: "
        if not isinstance(message, dict):
            raise BadRecordError(f"message {number} is {type(message).__name__}, not a map with role and content")
        message = dict(without(message, ignored))
        content = message.get("content", message.get("value"))
        is_empty = content in (None, []) or (isinstance(content, str) and is_blank(content))
        is_system = message.get("role", message.get("from")) in _SYSTEM_ROLES
        if is_empty and is_system and message.keys() & {"content", "value"}:
            continue  # as a record without a system text
        has_old_calls |= bool(message.get("function_call"))
        marks.append(mark_of(message, place))
        messages.append(_checked({name: message[name] for name in message if name not in MARKS}, number))
        refuse_others(messages[-1], ("role", "content"), place)
    for message in messages if has_old_calls else []:  # their results, as the calls became tool calls
        message["role"] = "tool" if message["role"] == "function" else message["role"]
    _check_turns(messages)
    return Conversation(messages=messages, marks=marks)


def check_prompt(prompt: Any, messages: list[dict[str, Any]], key: str) -> None:
    """Raise `BadRecordError` if a prompt that is not read, since the messages have it, is not among them."""
    contents = [str(message.get("content", "")).strip() for message in messages]
    rest = str(prompt or "") if isinstance(prompt, str) else ""
    asked = [text.strip() for text in texts_by_role(messages)[0]]
    prompt = [prompt] if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, str) and not are_messages(prompt):
        missing = not is_inside(prompt, asked)
    elif isinstance(prompt, list):
        inside = [message.get("content", message.get("value")) for message in prompt if isinstance(message, dict)]
        missing = any(str(content or "").strip() not in (*contents, "") for content in inside)
    elif missing := bool(rest.strip()) and not is_inside(rest, asked):  # or a text that was made of the messages
        has_any = any(text in rest for text in asked if text)
        for content in sorted(contents, key=len, reverse=True):
            rest = rest.replace(content, " ") if content else rest
        missing = not (has_any and is_markup(rest))
    if missing:
        raise BadRecordError(
            f"{key!r} is not read, since the messages should have it, but they do not; write it as a message, or add "
            "it to data.format.ignored_fields"
        )


def is_markup(text: str) -> bool:
    """Whether a text has only what stands between messages, such as the names of roles."""
    return set(_WORD.findall(_TAG.sub(" ", text).lower())) <= _MARKUP


def _check_reply(record: Mapping[str, Any], messages: list[dict[str, Any]], read: Collection[str]) -> None:
    """Raise `BadRecordError` if the reply to the last message is next to the messages."""
    for name, value in record.items() if messages[-1]["role"] != ASSISTANT else ():
        if name not in read and is_reply(name, value):
            raise BadRecordError(
                f"{name!r} is not read, and the messages end without a reply; write it as a message, or add it to "
                "data.format.ignored_fields"
            )


def _check_turns(messages: list[dict[str, Any]]) -> None:
    for number, (before, after) in enumerate(pairwise(messages), start=2):
        if before["role"] == after["role"] == ASSISTANT:
            raise BadRecordError(f"messages {number - 1} and {number} both have the role assistant")


def _from_alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = {name: checked_text(record.get(name) or "", name) for name in _ALPACA}
    instruction, own = texts[_INSTRUCTION], texts[_INPUT]
    check_reply(own, f"{_INPUT!r} ")
    is_repeated = len(own.split()) >= _WORDS_OF_INPUT and is_inside(own, (instruction,))
    asked = "\n\n".join(text for text in (instruction, "" if is_repeated else own) if not is_blank(text))
    return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": texts[_OUTPUT]}]


def _from_completion(record: Mapping[str, Any], ignored: Collection[str]) -> Conversation:
    """A prompt and a completion that are messages. Replies in the prompt are no targets, as in TRL."""
    prompt, completion = (as_messages(record[name]) for name in (_PROMPT, _COMPLETION))
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": ASSISTANT, "content": completion}]
    if isinstance(prompt, str) and isinstance(completion, list):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRecordError(f"{_PROMPT!r} and {_COMPLETION!r} are not messages; set {READ_COMPLETIONS}")
    asked = check_messages(prompt, _PROMPT, ignored)
    answer = check_messages(completion, _COMPLETION, ignored)
    answer = answer.after(repeated_in(asked.messages, [answer.messages]))
    for message, mark in zip(asked.messages, asked.marks, strict=True):
        if mark and message["role"] == ASSISTANT:
            raise BadRecordError(
                f"a reply in {_PROMPT!r} is marked as a target, but nothing of a prompt is; write all as messages, or "
                "add the mark to data.format.ignored_fields"
            )
    marks = [
        False if message["role"] == ASSISTANT else mark
        for message, mark in zip(asked.messages, asked.marks, strict=True)
    ]
    return Conversation(messages=asked.messages, marks=marks) + answer


def repeated_in(asked: list[dict[str, Any]], answers: list[list[dict[str, Any]]], key: str = _PROMPT) -> int:
    """The number of messages of the prompt under `key`, from its end, that all answers start with. Only what they say
    counts, not keys such as id.

    Raises `BadRecordError` if an answer then starts with a message that belongs before the prompt.
    """
    said, theirs = list(map(spoken, asked)), [list(map(spoken, answer)) for answer in answers]
    found = next((n for n in range(len(said), 0, -1) if all(own[:n] == said[-n:] for own in theirs)), 0)
    for answer in answers:
        if len(answer) == found:
            raise BadRecordError("an answer has no message")
        role = answer[found]["role"]
        has_question = any(message["role"] not in (*_SYSTEM_ROLES, ASSISTANT) for message in asked)
        if role in _SYSTEM_ROLES or (role == "user" and (asked[-1]["role"] == "user" or not has_question)):
            raise BadRecordError(
                f"an answer starts with a message of the role {role}, which {key!r} does not have there; write "
                "the prompt once, with its system message, and only the reply as the answer"
            )
    return found


def spoken(message: dict[str, Any]) -> tuple[Any, ...]:
    """What two messages must have in common to be the same."""
    thoughts = tuple(str(message[name]).strip() for name in REASONING if message.get(name))
    return message["role"], str(message.get("content") or "").strip(), message.get("tool_calls"), thoughts


def _checked(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message without null values, as transformers passes it to templates: many would write "None"."""
    if message.get("role") is not None and message.get("from") is not None:
        raise BadRecordError(f"message {number} has 'role' and 'from'; keep one of them")
    if message.get("from") is not None and message.get("content") not in (None, "", message.get("value")):
        raise BadRecordError(f"message {number} has 'value' and 'content'; keep one of them")
    if message.get("role") is None and message.keys() >= {"from", "value"}:
        message = {**message, "role": message["from"], "content": message["value"]}
        message = {name: value for name, value in message.items() if name not in ("from", "value")}
    kept = {name: value for name, value in message.items() if value is not None}
    if isinstance(kept.get("role"), str):
        kept["role"] = _FROM.get(kept["role"].lower(), kept["role"].lower())
    if kept.get("role") == _CALL:
        listed = parsed(kept.pop("content", None), f"message {number}: content")
        kept |= {"role": ASSISTANT, "content": "", "tool_calls": listed if isinstance(listed, list) else [listed]}
    if "role" not in kept:
        raise BadRecordError(f"message {number} has no role (it has {listed_keys(kept)})")
    if kept["role"] not in ROLES:
        raise BadRecordError(f"message {number}: unknown role {kept['role']!r}; known are {', '.join(ROLES)}")
    if call := kept.pop("function_call", None):  # OpenAI's older form of one tool call
        if kept.get("tool_calls"):
            raise BadRecordError(f"message {number} has function_call and tool_calls; keep one of them")
        kept["tool_calls"] = [{"type": "function", "function": call}]
    if calls := calls_of(kept.pop("tool_calls", None), f"message {number}: "):
        kept["tool_calls"] = calls
    if isinstance(kept.get("content"), list):
        parts, kept["content"] = kept["content"], _joined(kept["content"], number)
        # named with the keys of messages that are not read
        kept |= {
            f"content.{name}": part[name] for part in parts for name in part if name not in _OF_PARTS and part[name]
        }
    elif not isinstance(kept.get("content", ""), str):
        raise BadRecordError(
            f"message {number}: content is {type(kept['content']).__name__}, not text or a list of text parts"
        )
    elif kept["role"] == ASSISTANT and not kept.get("tool_calls"):
        check_reply(kept.get("content", ""), f"message {number}: content ")
    elif _PARTS_AS_TEXT.match(kept.get("content", "")) or kept.get("content", "").strip() in _MISSING:
        check_reply(kept["content"], f"message {number}: content ")
    if "content" not in message and not kept.get("tool_calls"):
        raise BadRecordError(f"message {number} has no content (it has {listed_keys(kept)})")
    content, thoughts = str(kept.get("content") or ""), [str(kept[name]) for name in REASONING if kept.get(name)]
    is_written = any(len(text.split()) >= _WORDS_OF_REASONING and is_inside(text, (content,)) for text in thoughts)
    if thoughts and (is_written or _THINKING.search(content) or END_OF_THINKING in "".join(thoughts)):
        raise BadRecordError(
            f"message {number} has reasoning in 'content' and under another key, and both would be written; keep one "
            "of them, or add the key to data.format.ignored_fields"
        )
    if kept.get("tool_calls") and ("<tool_call>" in content or names_all(content, kept["tool_calls"])):
        raise BadRecordError(
            f"message {number} has its calls in 'content' and in 'tool_calls', and both would be written; keep one of "
            "them, or add 'tool_calls' to data.format.ignored_fields"
        )
    is_empty = is_blank(content) and not kept.get("tool_calls")
    if is_empty and kept["role"] not in ("tool", "function"):
        others = [name for name in kept if name not in ("role", "content")]
        raise BadRecordError(
            f"message {number} (role {kept['role']}) is empty" + (f" (it has {listed_keys(others)})" if others else "")
        )
    for name in ("value", "text"):
        if isinstance(kept.get(name), str) and kept[name].strip() not in kept.get("content", ""):
            raise BadRecordError(f"message {number} has 'content' and other text under {name!r}; keep one of them")
    return kept


def check_reply(text: str, place: str) -> None:
    """Raise `BadRecordError` for a reply that is cut off, is a missing value as text, or a list of parts as text."""
    thinks, ends = text.rfind("<think>"), text.rfind(END_OF_THINKING)
    if thinks > ends:
        raise BadRecordError(f"{place}has reasoning without an end; leave such a record out")
    if ends >= 0 and is_blank(text[ends + len(END_OF_THINKING) :]):
        raise BadRecordError(f"{place}has reasoning without a reply; leave such a record out")
    if text.strip() in _MISSING:
        raise BadRecordError(f"{place}is {text.strip()!r}, as pandas writes a missing value")
    if _PARTS_AS_TEXT.match(text):
        raise BadRecordError(f"{place}is a list of parts as JSON text; write the list itself, or the text")


def _joined(parts: list[Any], number: int) -> str:
    """The text of a content that is a list of parts, without separators, as templates that read such lists write it."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and not isinstance(part.get("text"), str):
            raise BadRecordError(f"message {number}: content has a part without text under the key 'text'")
        if kind != "text":
            raise BadRecordError(
                f"message {number}: content has a part of type {kind!r}; only {{type: text, text: ...}} is supported"
            )
        if mark_of(part, f"message {number}: ") is False:
            raise BadRecordError(f"message {number}: one part of its content is no target; mark complete messages")
        refuse_others(part, _OF_PARTS, f"message {number}: ")
        texts.append(part["text"])
    return "".join(texts)
