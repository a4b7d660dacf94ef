"""Conversations and completions as texts, and the parts of them that are targets."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.hf.chat_template import ChatTemplate, Rendered, TemplateError
from lmtrain.preprocess.messages import ASSISTANT, find_key, message_keys, parsed, read_messages
from lmtrain.preprocess.records import (
    PREFERENCE,
    READ_PREFERENCES,
    BadRecordError,
    InstructionText,
    checked_text,
    listed_keys,
)

# Keys of a record besides the messages that reach the template.
TOOLS, VARIABLES = "tools", "chat_template_kwargs"
# Stands before a conversation that the assistant starts, to learn what the template writes for its message elsewhere.
_OPENING = {"role": "user", "content": "x"}

Span = tuple[int, int]


@dataclass(frozen=True)
class Conversations:
    """Reads records with conversations. `loss_on` is a setting of `ChatFormat`."""

    template: ChatTemplate
    messages_field: str
    loss_on: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read."""
        return *message_keys(self.messages_field), TOOLS, VARIABLES

    def check_keys(self, keys: Collection[str]) -> None:
        find_key(keys, self.messages_field)

    def read(self, record: Mapping[str, Any]) -> InstructionText:
        """The conversation of a record. Raises `BadRecordError`, and `UserError` for a fault of the template."""
        messages = read_messages(record, self.messages_field)
        rendering = Rendering.of(self.template, messages, record, self.variables)
        return rendering.as_text(rendering.targets(self.loss_on))


class Rendering:
    """A conversation as text, and its targets."""

    def __init__(self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, variables: Any):
        self._template = template
        self._messages = messages
        self._more = (tools, variables)
        whole = self._render(messages)
        self.text = whole.text
        self._marked = tuple(span for span in whole.generated if span[0] < span[1])

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        record: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> "Rendering":
        """These messages of a record, which may have tools and variables of its own."""
        tools, own = (parsed(record.get(name), name) for name in (TOOLS, VARIABLES))
        return cls(template, messages, tools or None, {**variables, **(own or {})})

    def as_text(self, targets: tuple[Span, ...]) -> InstructionText:
        """The text with these targets."""
        replies = [message for message in self._messages if message["role"] == ASSISTANT]
        written = all(_is_written(message, self.text) for message in replies)
        return InstructionText(self.text, targets, _strings(self._messages), written)

    def answer(self, number: int) -> Span:
        """The part of the text from message `number` (from 0) to the end, after the message's header."""
        if self._messages[number]["role"] == ASSISTANT:
            return len(self._prompt(number, self.text)), len(self.text)
        return self._end(self._render(self._messages[:number]).text, number - 1, "a prompt that ends before it"), len(
            self.text
        )

    def targets(self, loss_on: str) -> tuple[Span, ...]:
        """The parts of the text that are targets, ascending."""
        if loss_on == "all":
            return ((0, len(self.text)),)
        turns = [number for number, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        if not self._marked:
            return tuple(self._turn(number) for number in (turns[-1:] if loss_on == "last" else turns))
        if loss_on == "last" and len(turns) > 1:
            return self._marked_from(turns[-1])
        return self._marked

    def _marked_from(self, number: int) -> tuple[Span, ...]:
        """The parts that the template marks in message `number` (from 0) and later ones. A message may have several."""
        start = self._end(self._render(self._messages[:number]).text, number - 1, "loss_on: assistant")
        return tuple(span for span in self._marked if span[0] >= start)

    def _turn(self, number: int) -> Span:
        """The part that the template writes for the assistant's message `number` (from 0), after its header."""
        through = self._render(self._messages[: number + 1]).text
        start = self._start_of_first(through) if number == 0 else len(self._prompt(number, through))
        return start, self._end(through, number, "loss_on: last")

    def _prompt(self, number: int, through: str) -> str:
        """The text up to the header of message `number`, inclusive. `through` is the text up to the message's end."""
        before = self._render(self._messages[:number], prompt=True).text
        if not through.startswith(before):
            raise BadRecordError(
                f"message {number + 1}: the chat template does not write it after the prompt for it; use a template "
                "with {% generation %} marks"
            )
        return before

    def _start_of_first(self, text: str) -> int:
        """Where the message starts in the `text` of a conversation that consists of one message of the assistant.

        Templates cannot write the prompt for a first message, after their own system text and tools. It is found by
        what the template writes after the header for the same message as a second one; or, if it writes a first message
        differently (such as without its reasoning), by the header: the first after the point where the text differs
        from that of a user's message.
        """
        asked, prompted = (self._render([_OPENING], prompt=prompt).text for prompt in (False, True))
        second = self._render([_OPENING, self._messages[0]]).text
        reply = second.removeprefix(prompted)
        if reply != second and text.endswith(reply):
            return len(text) - len(reply)
        header = prompted[len(asked) :] if prompted.startswith(asked) else ""
        differs = next((at for at, (a, b) in enumerate(zip(text, asked, strict=False)) if a != b), 0)
        start = text.find(header, max(0, differs + 1 - len(header)))
        if not header or start < 0:
            raise BadRecordError(
                "message 1: the chat template does not show where a first message of the assistant starts; use a "
                "template with {% generation %} marks"
            )
        return start + len(header)

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> Rendered:
        try:
            return self._template.render(messages, *self._more, prompt)
        except TemplateError as error:
            raise BadRecordError(f"the chat template fails: {error}") from None

    def _end(self, through: str, number: int, alternative: str) -> int:
        """Where message `number` ends in the text. `through` is the text of the messages up to it."""
        if not self.text.startswith(through):  # perhaps because of an EOS token at the end of every conversation
            through = through.removesuffix(dict(self._template.tokens).get("eos_token", ""))
        if not self.text.startswith(through):
            raise BadRecordError(
                f"message {number + 1}: the chat template rewrites it once later messages follow (such as removing its "
                f"reasoning), so its targets are ambiguous; use a template that keeps it, or {alternative}"
            )
        return len(through)


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

    def check_keys(self, keys: Collection[str]) -> None:
        for key, setting in ((self.input_field, "input_field"), (self.output_field, "output_field")):
            if key not in keys:
                advice = READ_PREFERENCES if set(keys) >= PREFERENCE else f"data.format.{setting} to the key"
                raise BadRecordError(f"no key {key!r} (it has {listed_keys(keys)}); set {advice}")

    def read(self, record: Mapping[str, Any]) -> InstructionText:
        """Prompt and completion of a record. Raises `BadRecordError`."""
        self.check_keys(record)
        prompt, completion = (checked_text(record[key], key) for key in self.columns)
        if not completion:
            raise BadRecordError(f"{self.output_field!r} is empty")
        before = prompt + self.separate_with
        return InstructionText(
            before + completion,
            ((len(before), len(before) + len(completion)),),
            (prompt, completion),
            is_plain=True,
        )


def _is_written(message: Mapping[str, Any], text: str) -> bool:
    """Whether a text has the content of a message and the names of its calls. Templates may drop its reasoning."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    content = str(message.get("content") or "").rpartition("</think>")[2].strip()
    return content in text and all(str(name) in text for name in names if name)


def _strings(value: Any) -> tuple[str, ...]:
    """Every text in the contents of messages."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        value = [part for name, part in value.items() if name != "role"]
    if isinstance(value, Sequence):
        return tuple(text for part in value for text in _strings(part))
    return ()
