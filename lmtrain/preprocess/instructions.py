"""Conversations and completions as texts, and the parts of them that are targets."""

import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.hf.chat_template import ChatTemplate, Rendered, TemplateError
from lmtrain.preprocess.messages import (
    ASSISTANT,
    CONVERSATIONS,
    END_OF_THINKING,
    REASONING,
    Conversation,
    are_messages,
    check_reply,
    conversations_of,
    find_key,
    is_markup,
    read_conversation,
    reads_key,
)
from lmtrain.preprocess.record_keys import (
    CONTEXT,
    FUNCTIONS,
    SYSTEM,
    TOOLS,
    are_lists,
    function_of,
    is_blank,
    is_context,
    is_reply,
    is_unread,
    leaves_of,
    may_matter,
    parsed_json,
    refuse_context,
    refuse_others,
    refuse_others_of,
    strings_of,
    without,
)
from lmtrain.preprocess.records import (
    PREFERENCE,
    READ_CHATS,
    READ_PREFERENCES,
    BadRecordError,
    InstructionText,
    checked_text,
    listed_keys,
)

# Stands before a conversation that the assistant starts, to learn what the template writes for its message elsewhere.
_OPENING = {"role": "user", "content": "x"}
# Keys of a message that are checked elsewhere, and one whose text few templates write.
_OWN_KEYS, _OLD_CALLS = ("role", "content", "tool_calls", "name", "tool_call_id"), "function_calls"
# A tag that stands directly inside of itself.
_TWICE = re.compile(r"<(?P<tag>\w+)>\s*<(?P=tag)>")
# Keys of tool calls that are read, or that change nothing.
_OF_CALLS = ("id", "type", "index", "function", "name", "arguments")
# Characters before a prompt that an answer repeats after the text of a template.
_PREAMBLE = 1000
# A shorter question, such as "Hello", may well start its answer.
_WORDS_OF_QUESTION = 3

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Reads records with conversations. `loss_on` and `ignored_fields` are settings of `ChatFormat`."""

    template: ChatTemplate
    messages_field: str
    loss_on: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    ignored_fields: Sequence[str] = ()

    @property
    def key(self) -> str:
        return self.messages_field

    def reads(self, key: str) -> bool:
        return reads_key(key, self.messages_field) or is_reply(key, "text")

    def passes_over(self, key: str, value: Any = None) -> bool:
        own = (self.messages_field, *self.ignored_fields)
        return key not in own and is_unread(key, value, reads_key(key, self.messages_field))

    def check_keys(self, keys: Collection[str]) -> None:
        find_key(keys, self.messages_field)

    def read(self, record: Mapping[str, Any]) -> InstructionText:
        """The conversation of a record. Raises `BadRecordError`, and `UserError` for a fault of the template."""
        conversation = read_conversation(record, self.messages_field, self.ignored_fields)
        rendering = Rendering(self.template, conversation, self.variables)
        return rendering.as_text(rendering.targets(self.loss_on))


class Rendering:
    """A conversation as text, and its targets."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any]):
        self._template = template
        self._messages = conversation.messages
        self._marks = conversation.marks
        self._more = (conversation.tools, {**variables, **conversation.variables})
        whole = self._render(self._messages)
        self.text = whole.text
        self._marked = tuple(span for span in whole.generated if span[0] < span[1])

    def as_text(self, targets: tuple[Span, ...]) -> InstructionText:
        """The text with these targets."""
        marked = "".join(self.text[start:end] for start, end in self._marked)
        replies = [message for message in self._messages if message["role"] == ASSISTANT]
        return InstructionText(
            text=self.text,
            targets=targets,
            contents=strings_of(self._messages),
            is_written=_are_written(self._messages, self._more[0], self.text) and not self._doubles_tags,
            is_marked=not self._marked or _are_written(replies, None, marked),
            has_reasoning=all(text in self.text for message in self._messages for text in _reasoning(message)),
            repeats_prompt=_last_repeats(self._messages),
            passed_over=_passed_over(self._messages, self.text),
        )

    @property
    def _doubles_tags(self) -> bool:
        """Whether the template puts a content that has its tag already into the same tag, such as <tool_response>."""
        contents = strings_of(self._messages)
        return any(
            not any(twice in own for own in contents)
            for twice in (match.group() for match in _TWICE.finditer(self.text))
        )

    def answer(self, number: int) -> Span:
        """The part of the text from message `number` (from 0) to the end, after the message's header."""
        if self._messages[number]["role"] == ASSISTANT:
            return len(self._prompt(number, self.text)), len(self.text)
        return self._end(self._render(self._messages[:number]).text, number - 1, "a prompt that ends before it"), len(
            self.text
        )

    def targets(self, loss_on: str) -> tuple[Span, ...]:
        """The parts of the text that are targets, ascending. Marks of messages exclude some from those of `loss_on`.

        Raises `BadRecordError` if a message is marked that `loss_on` excludes by its role.
        """
        turns = [number for number, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        for number, mark in enumerate(self._marks):
            if mark and loss_on != "all" and number not in turns:
                raise BadRecordError(
                    f"message {number + 1} (role {self._messages[number]['role']}) is marked as a target, but "
                    f"data.format.loss_on is {loss_on}; set it to all, with weight: 0 for messages without a loss, or "
                    "add the mark to data.format.ignored_fields"
                )
        if loss_on == "all":
            spans: tuple[Span, ...] = ((0, len(self.text)),)
        elif not self._marked:
            wanted = turns[-1:] if loss_on == "last" else turns
            other = "conversations that end with a reply" if loss_on == "last" else "loss_on: last"
            spans = tuple(self._turn(number, other) for number in wanted if self._marks[number] is not False)
            self._refuse_others("".join(self.text[start:end] for start, end in spans))
            return spans
        elif loss_on == "last" and len(turns) > 1:
            spans = self._marked_from(turns[-1])
        else:
            spans = self._marked
        for number, mark in enumerate(self._marks):
            if mark is False:
                spans = _outside(spans, self._message(number))
        if loss_on != "all":
            self._refuse_others("".join(self.text[start:end] for start, end in spans))
        return spans

    def _refuse_others(self, targets: str) -> None:
        """Raise `BadRecordError` if the template writes other messages into the parts that are learned."""
        replies = [message for message in self._messages if message["role"] == ASSISTANT]
        own = "\n".join(text for message in replies for text in strings_of(message))
        for number, message in enumerate(self._messages, start=1):
            text = str(message.get("content") or "").strip()
            is_long = message["role"] != ASSISTANT and len(text.split()) >= _WORDS_OF_QUESTION
            if is_long and text in targets and text not in own:
                raise BadRecordError(
                    f"message {number} (role {message['role']}) would be learned as a reply, since the chat template "
                    "writes it there; use another template, or data.format.loss_on: all"
                )

    def _message(self, number: int) -> Span:
        """The part of the text that the template writes for message `number` (from 0), with its header."""
        ends = [
            self._end(self._render(self._messages[:last]).text, last - 1, "remove the mark") if last else 0
            for last in (number, number + 1)
        ]
        return ends[0], ends[1]

    def _marked_from(self, number: int) -> tuple[Span, ...]:
        """The parts that the template marks in message `number` (from 0) and later ones. A message may have several."""
        start = self._end(self._render(self._messages[:number]).text, number - 1, "loss_on: assistant")
        return tuple(span for span in self._marked if span[0] >= start)

    def _turn(self, number: int, alternative: str) -> Span:
        """The part that the template writes for the assistant's message `number` (from 0), after its header."""
        through = self._render(self._messages[: number + 1]).text
        start = self._start_of_first(through) if number == 0 else len(self._prompt(number, through))
        return start, self._end(through, number, alternative)

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


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Reads records with a prompt and a completion. The other fields are settings of `CompletionFormat`."""

    input_field: str
    output_field: str
    separate_with: str
    ignored_fields: Sequence[str] = ()

    @property
    def key(self) -> str:
        return self.input_field

    def passes_over(self, key: str, value: Any = None) -> bool:
        own = (self.input_field, self.output_field, *self.ignored_fields)
        return key not in own and is_unread(key, value, self.reads(key))

    def reads(self, key: str) -> bool:
        return key in (self.input_field, self.output_field, *CONVERSATIONS) or may_matter(key)

    def check_keys(self, keys: Collection[str]) -> None:
        for key, setting in ((self.input_field, "input_field"), (self.output_field, "output_field")):
            if key not in keys:
                advice = READ_PREFERENCES if set(keys) >= PREFERENCE else f"data.format.{setting} to the key"
                advice += " (for plain texts remove data.format)" if set(keys) == {"text"} else ""
                raise BadRecordError(f"no key {key!r} (it has {listed_keys(keys)}); set {advice}")

    def read(self, record: Mapping[str, Any]) -> InstructionText:
        """Prompt and completion of a record. Raises `BadRecordError`."""
        self.check_keys(record)
        record = without(record, self.ignored_fields)
        keys = (self.input_field, self.output_field)
        if messages := [key for key in keys if are_messages(record.get(key))]:
            raise BadRecordError(f"{messages[0]!r} has messages; set {READ_CHATS}")
        prompt, completion = (checked_text(record.get(key), key) for key in keys)
        refuse_others(record, (*keys, *SYSTEM, TOOLS, FUNCTIONS, *CONTEXT))
        refuse_context(record, keys, (prompt,), (completion,))
        refuse_others_of(conversations_of(record), CONVERSATIONS, keys, (prompt, completion))
        if is_blank(completion):
            raise BadRecordError(f"{self.output_field!r} is empty")
        check_reply(completion, f"{self.output_field!r} ")
        if are_lists(prompt, completion):
            raise BadRecordError(f"{keys[0]!r} and {keys[1]!r} are JSON lists of texts; write them as texts")
        before = prompt + self.separate_with
        return InstructionText(
            text=before + completion,
            targets=((len(before), len(before) + len(completion)),),
            contents=(prompt, completion),
            is_plain=True,
            repeats_prompt=repeats(completion, prompt),
        )


def repeats(answer: str, prompt: str) -> bool:
    """Whether an answer starts with the words of the prompt, perhaps after the name of a role, such as Human."""
    words = " ".join(unicodedata.normalize("NFC", prompt).split())
    text = " ".join(unicodedata.normalize("NFC", answer[: 4 * len(prompt) + _PREAMBLE]).split())
    before, found, after = text.partition(words) if words else ("", "", "")
    is_cut = words[-1:].isalnum() and after[:1].isalnum()
    is_turn = len(words.split()) >= _WORDS_OF_QUESTION and is_markup(" ".join(before.split()[-1:]))
    return bool(found) and not is_cut and (is_markup(before) or is_turn)


def _are_written(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, text: str) -> bool:
    """Whether a text has the contents of messages, their calls with the arguments, and the names of the tools and of
    their parameters. Templates may drop reasoning, write the results of tools in another form, and move texts."""
    if not _are_contents_written([(message["role"], _reply_of(message)) for message in messages], text):
        return False
    start = 0  # where the message before ends
    for message in messages:
        content = _reply_of(message)
        found = text.find(content, start)
        others = [(name, value) for name, value in message.items() if name not in (*_OWN_KEYS, *REASONING)]
        for name, value in others:
            if name in (TOOLS, FUNCTIONS):
                listed = parsed_json(value)
                described = [function_of(tool) for tool in listed] if isinstance(listed, list) else [{}]
                names = [str(tool.get("name", "")) for tool in described]
                needed = names if all(names) else list(strings_of(value))
            else:
                is_needed = name == _OLD_CALLS or is_context(name, value)
                needed = [part.strip() for part in leaves_of(value)] if is_needed else []
            if not all(_is_written(part, text) for part in needed):
                return False
        calls = [function_of(call) for call in message.get("tool_calls") or []]
        written = [str(call["name"]) for call in calls if call.get("name")]
        written += [leaf for call in calls for leaf in leaves_of(call.get("arguments"))]
        if not all(_is_written(part, text[start:]) for part in written):
            return False
        start = max(start, found + len(content))
    described = [function_of(tool) for tool in tools or ()]
    names = [str(tool["name"]) for tool in described if tool.get("name")]
    for tool in described:
        properties = (
            (tool.get("parameters") or {}).get("properties") if isinstance(tool.get("parameters"), Mapping) else {}
        )
        names += [str(name) for name in properties or {}]
    return all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)


def _are_contents_written(messages: Sequence[tuple[str, str]], text: str) -> bool:
    """Whether a text has the contents of messages, given with their roles: in their order, or as often as they do."""
    start, in_order = 0, True
    for _, content in messages:
        found = text.find(content, start)
        in_order = in_order and found >= 0
        start = max(start, found + len(content))
    if in_order:
        return True
    start = 0
    for number, (role, content) in enumerate(messages):
        times = sum(other.count(content) for _, other in messages) if content else 0
        if text.count(content) < times:
            ends = [text.find(other, start) for _, other in messages[number + 1 : number + 2]]
            own = text[start : max(start, *ends, 0) if ends else len(text)]
            leaves = leaves_of(parsed_json(content)) if role in ("tool", "function") else []
            if not leaves or not all(_is_written(leaf, own) for leaf in leaves):
                return False
        else:
            start = max(start, text.find(content, start) + len(content))
    return True


def _last_repeats(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last reply starts with all of the question before it, of several words."""
    if len(messages) < 2 or messages[-1]["role"] != ASSISTANT:
        return False
    asked = str(messages[-2].get("content") or "")
    return len(asked.split()) >= _WORDS_OF_QUESTION and repeats(_reply_of(messages[-1]), asked)


def _passed_over(messages: Sequence[Mapping[str, Any]], text: str) -> tuple[str, ...]:
    """The keys of messages and of their calls whose values the text does not have. Only texts of several words are
    looked for: the template may write a short one for another reason."""

    def is_lost(value: Any) -> bool:
        texts = strings_of(value)
        return not texts or not all(" " in part.strip() and part.strip() in text for part in texts)

    names: dict[str, None] = {}
    for message in messages:
        for name, value in message.items():
            if name == "name":
                lost = message["role"] in ("user", ASSISTANT) and str(value) not in text
            else:
                is_own = name in (*_OWN_KEYS, *REASONING)
                lost = not is_own and is_unread(name, value, may_matter(name)) and is_lost(value)
            names |= {name: None} if lost and value not in ("", [], {}) else {}
        for call in message.get("tool_calls") or []:
            others = [each for each in (call, function_of(call)) if isinstance(each, Mapping)]
            for name, value in [item for each in others for item in each.items()]:
                if name not in _OF_CALLS and value not in (None, "", [], {}) and is_lost(value):
                    names[f"tool_calls.{name}"] = None
    return tuple(names)


def _reply_of(message: Mapping[str, Any]) -> str:
    """The content of a message without what the model thinks before."""
    return str(message.get("content") or "").rpartition(END_OF_THINKING)[2].strip()


def _is_written(part: str, text: str) -> bool:
    """Whether a text has this part, as it is or as JSON spells it."""
    return part in text or json.dumps(part, ensure_ascii=part.isascii())[1:-1] in text


def _reasoning(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message that the model thinks before its reply."""
    content = str(message.get("content") or "") if message["role"] == ASSISTANT else ""
    before = content.rpartition(END_OF_THINKING)[0].split("<think>")
    thoughts = [*before, *(part for name in REASONING for part in strings_of(message.get(name)))]
    return [text.strip() for text in thoughts]


def _outside(spans: Sequence[Span], excluded: Span) -> tuple[Span, ...]:
    """The parts of ascending spans that are outside of another one."""
    parts = [part for start, end in spans for part in ((start, min(end, excluded[0])), (max(start, excluded[1]), end))]
    return tuple(dict.fromkeys(part for part in parts if part[0] < part[1]))
