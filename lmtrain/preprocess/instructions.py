"""Conversations and completions as texts, and the parts of them that are targets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.chat_template import ChatTemplate, TemplateError
from lmtrain.preprocess.text import Instruction

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ASSISTANT = "assistant"
# Keys of a record besides the messages that reach the template.
_TOOLS, _VARIABLES = "tools", "chat_template_kwargs"
# Names of keys in another common form of messages.
_OTHER_FORM = {"from", "value"}


@dataclass(frozen=True)
class Conversations:
    """Reads records with conversations. `loss_on` is a setting of `ChatFormat`."""

    template: ChatTemplate
    messages_field: str
    loss_on: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read; all but the first may be missing."""
        return self.messages_field, _TOOLS, _VARIABLES

    def read(self, record: Mapping[str, Any], place: str) -> Instruction | UserError:
        """The conversation of a record; error messages start with `place`."""
        try:
            messages = self._messages(record)
            tools, own = (_parsed(record.get(name)) for name in (_TOOLS, _VARIABLES))
            return self._render(messages, tools or None, {**self.variables, **(own or {})})
        except _BadConversationError as error:
            return UserError(f"{place}: {error}")

    def _messages(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self.messages_field not in record:
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            raise _BadConversationError(
                f"no key {self.messages_field!r} (it has {keys}); set format.messages_field to the key of the messages"
            )
        found = _parsed(record[self.messages_field])
        if not isinstance(found, list) or not found:
            what = "an empty list" if found == [] else type(found).__name__
            raise _BadConversationError(f"{self.messages_field!r} is {what}, not a list of messages")
        messages = [_without_nulls(message, number) for number, message in enumerate(found, start=1)]
        for number, (before, after) in enumerate(pairwise(messages), start=2):
            if before["role"] == after["role"] == _ASSISTANT:
                raise _BadConversationError(f"messages {number - 1} and {number} are both of the assistant")
        return messages

    def _render(self, messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any]) -> Instruction:
        def render(count: int, prompt: bool = False) -> tuple[str, tuple[tuple[int, int], ...]]:
            try:
                rendered = self.template.render(messages[:count], tools, variables, prompt)
            except TemplateError as error:
                raise _BadConversationError(f"the chat template fails: {error}") from None
            return rendered.text, rendered.generated

        text, marked = render(len(messages))
        if self.loss_on == "all":
            return Instruction(text, ((0, len(text)),), _strings(messages))
        spans = tuple(span for span in marked if span[0] < span[1])
        if not spans:
            turns = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
            turns = turns[-1:] if self.loss_on == "last" else turns
            spans = tuple(self._turn(n, text, lambda count, prompt=False: render(count, prompt)[0]) for n in turns)
        return Instruction(text, spans[-1:] if self.loss_on == "last" else spans, _strings(messages))

    @staticmethod
    def _turn(number: int, text: str, render: Any) -> tuple[int, int]:
        """The part of the text that the assistant writes in message `number`, from 0, by comparing prefixes."""
        before, after = render(number, True) if number else "", render(number + 1)
        if not after.startswith(before):
            raise _BadConversationError(
                f"message {number + 1}: the chat template does not write it after the prompt for it; use a template "
                "with {% generation %} marks"
            )
        if not text.startswith(after):
            raise _BadConversationError(
                f"message {number + 1}: the chat template rewrites it once later messages follow (such as removing its "
                "reasoning), so its targets are ambiguous; use a template that keeps it, or loss_on: last"
            )
        return len(before), len(after)


@dataclass(frozen=True)
class Completions:
    """Reads records with a prompt and a completion."""

    input_field: str
    output_field: str
    separate_with: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read."""
        return self.input_field, self.output_field

    def read(self, record: Mapping[str, Any], place: str) -> Instruction | UserError:
        """Prompt and completion of a record; error messages start with `place`."""
        parts = []
        for key, setting in ((self.input_field, "input_field"), (self.output_field, "output_field")):
            if key not in record:
                keys = ", ".join(map(repr, list(record)[:8])) or "none"
                return UserError(f"{place}: no key {key!r} (it has {keys}); set format.{setting} to the key")
            if not isinstance(record[key], str):
                return UserError(f"{place}: {key!r} is {type(record[key]).__name__}, not text")
            parts.append(record[key])
        if not parts[1]:
            return UserError(f"{place}: {self.output_field!r} is empty")
        before = parts[0] + self.separate_with
        return Instruction(before + parts[1], ((len(before), len(before) + len(parts[1])),), tuple(parts))


def instruction_reader(
    settings: Mapping[str, Any] | None, template: ChatTemplate | None
) -> Conversations | Completions | None:
    """The reader for `DocumentSettings.format`; None for text."""
    if settings is None:
        return None
    if settings["type"] == "completion":
        return Completions(settings["input_field"], settings["output_field"], settings["separate_with"])
    assert template is not None
    return Conversations(
        template, settings["messages_field"], settings["loss_on"], settings.get("chat_template_kwargs", {})
    )


class _BadConversationError(Exception):
    """What is wrong with a conversation, without its place."""


def _parsed(value: Any) -> Any:
    """A list or map; some datasets store them as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _BadConversationError(f"not JSON: {error}") from None


def _without_nulls(message: Any, number: int) -> dict[str, Any]:
    """A checked message without null values, which columns of datasets contain for missing keys."""
    if not isinstance(message, dict):
        raise _BadConversationError(f"message {number} is {type(message).__name__}, not a map with role and content")
    kept = {name: value for name, value in message.items() if value is not None}
    if "role" not in kept:
        hint = "; rename 'from' to role and 'value' to content" if kept.keys() >= _OTHER_FORM else ""
        raise _BadConversationError(
            f"message {number} has no role (it has {', '.join(map(repr, kept)) or 'nothing'}){hint}"
        )
    if kept["role"] not in ROLES:
        raise _BadConversationError(f"message {number}: unknown role {kept['role']!r}; known are {', '.join(ROLES)}")
    if kept.get("content") in (None, "", []) and not kept.get("tool_calls"):
        raise _BadConversationError(f"message {number} of the {kept['role']} is empty")
    return kept


def _strings(value: Any) -> tuple[str, ...]:
    """Every text in the contents of messages."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        value = [part for name, part in value.items() if name != "role"]
    if isinstance(value, Sequence):
        return tuple(text for part in value for text in _strings(part))
    return ()
