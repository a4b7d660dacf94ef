"""Messages of a conversation, from records of any common shape.

    {"messages": [{"role": "user", "content": "..."}, ...]}           OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca

The last two are recognized if a record has no key `messages` and `messages_field` has its default.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from lmtrain.config.json_text import parse_json
from lmtrain.data.formats import ChatFormat
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
_OPENAI: str = ChatFormat.model_fields["messages_field"].default
_SHAREGPT = "conversations"
_INSTRUCTION, _INPUT, _OUTPUT, _SYSTEM, _HISTORY = "instruction", "input", "output", "system", "history"
_ALPACA = (_INSTRUCTION, _INPUT, _OUTPUT, _SYSTEM, _HISTORY)
# Names of roles in `from`, in addition to ROLES.
_FROM = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "observation": "tool"}


def message_keys(messages_field: str) -> tuple[str, ...]:
    """Keys of a record that may hold messages."""
    return (messages_field, _SHAREGPT, *_ALPACA) if messages_field == _OPENAI else (messages_field,)


def find_key(keys: Collection[str], messages_field: str) -> str:
    """The key of the messages in records with these `keys`; that of the instruction in Alpaca's shape.

    Raises `BadRecordError` if there is none.
    """
    if messages_field in keys:
        return messages_field
    if messages_field == _OPENAI and _SHAREGPT in keys:
        return _SHAREGPT
    if messages_field == _OPENAI and {_INSTRUCTION, _OUTPUT} <= set(keys):
        return _INSTRUCTION
    setting = "data.format.messages_field to the key of the messages"
    for shape, other in ((COMPLETION, READ_COMPLETIONS), (PREFERENCE, READ_PREFERENCES)):
        setting = other if set(keys) >= shape else setting
    raise BadRecordError(f"no key {messages_field!r} (it has {listed_keys(keys)}); set {setting}")


def read_messages(record: Mapping[str, Any], messages_field: str) -> list[dict[str, Any]]:
    """The messages of a record, as templates expect them: `role`, and `content` as text.

    Raises `BadRecordError` if they cannot be read.
    """
    key = find_key(record, messages_field)
    return check_messages(parsed(record[key], key) if key != _INSTRUCTION else _from_alpaca(record), key)


def check_messages(listed: Any, key: str) -> list[dict[str, Any]]:
    """The messages of a list under `key`. Raises `BadRecordError` if it is none."""
    if not isinstance(listed, list) or not listed:
        what = "an empty list" if listed == [] else type(listed).__name__
        raise BadRecordError(f"{key!r} is {what}, not a list of messages")
    messages = [_checked(message, number) for number, message in enumerate(listed, start=1)]
    for number, (before, after) in enumerate(pairwise(messages), start=2):
        if before["role"] == after["role"] == ASSISTANT:
            raise BadRecordError(f"messages {number - 1} and {number} both have the role assistant")
    return messages


def parsed(value: Any, key: str) -> Any:
    """A list or map; some datasets store them as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadRecordError(f"{key!r} is text, but not JSON: {error}") from None


def _from_alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if record.get(_HISTORY):
        raise BadRecordError(f"{_HISTORY!r} of a record with {_INSTRUCTION!r} is not supported; write messages")
    texts = {name: checked_text(record.get(name) or "", name) for name in _ALPACA}
    asked = "\n\n".join(text for text in (texts[_INSTRUCTION], texts[_INPUT]) if text)
    system = [{"role": "system", "content": texts[_SYSTEM]}] if texts[_SYSTEM] else []
    return [*system, {"role": "user", "content": asked}, {"role": ASSISTANT, "content": texts[_OUTPUT]}]


def _checked(message: Any, number: int) -> dict[str, Any]:
    """A message without null values, as transformers passes it to templates: many would write "None"."""
    if not isinstance(message, dict):
        raise BadRecordError(f"message {number} is {type(message).__name__}, not a map with role and content")
    if message.get("role") is None and message.keys() >= {"from", "value"}:
        message = {**message, "role": _FROM.get(message["from"], message["from"]), "content": message["value"]}
        message = {name: value for name, value in message.items() if name not in ("from", "value")}
    kept = {name: value for name, value in message.items() if value is not None}
    if "role" not in kept:
        raise BadRecordError(f"message {number} has no role (it has {listed_keys(kept)})")
    if kept["role"] not in ROLES:
        raise BadRecordError(f"message {number}: unknown role {kept['role']!r}; known are {', '.join(ROLES)}")
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined(kept["content"], number)
    elif not isinstance(kept.get("content", ""), str):
        raise BadRecordError(
            f"message {number}: content is {type(kept['content']).__name__}, not text or a list of text parts"
        )
    if "content" not in message and not kept.get("tool_calls"):
        raise BadRecordError(f"message {number} has no content (it has {listed_keys(kept)})")
    if not kept.get("content") and not kept.get("tool_calls"):
        raise BadRecordError(f"message {number} (role {kept['role']}) is empty")
    return kept


def _joined(parts: list[Any], number: int) -> str:
    """The text of a content that is a list of parts, without separators, as templates that read such lists write it."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRecordError(
                f"message {number}: content has a part of type {kind!r}; only {{type: text, text: ...}} is supported"
            )
        texts.append(part["text"])
    return "".join(texts)
