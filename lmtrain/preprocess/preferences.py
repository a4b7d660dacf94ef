"""Pairs of answers to a prompt, of which one is preferred, in the forms that TRL reads.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                  texts
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}   messages, written by the chat template
    {"prompt": "...", "chosen": [messages], "rejected": [messages]}        the prompt is a message of the user
    {"chosen": ..., "rejected": ...}                                       with the prompt at the start of both answers

Answers that are messages may repeat the prompt, which is then read once. As in TRL, a prompt that is a text is ignored
if both answers have it among their messages.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.preprocess.instructions import Rendering, repeats
from lmtrain.preprocess.messages import (
    ASSISTANT,
    CONVERSATIONS,
    Conversation,
    as_messages,
    check_messages,
    check_prompt,
    check_reply,
    conversations_of,
    repeated_in,
    spoken,
    texts_by_role,
)
from lmtrain.preprocess.record_keys import (
    CONTEXT,
    FUNCTIONS,
    SYSTEM,
    TOOLS,
    VARIABLES,
    are_lists,
    is_blank,
    is_inside,
    is_unread,
    may_matter,
    parsed,
    refuse_context,
    refuse_others,
    system_text,
    tools_of,
    variables_of,
    without,
)
from lmtrain.preprocess.records import (
    AnswerPair,
    BadRecordError,
    EqualAnswersError,
    InstructionText,
    checked_text,
    listed_keys,
)
from lmtrain.runtime.errors import UserError

# Where a turn starts in a text with several, as in hh-rlhf.
_TURN = re.compile(r"\n\n(Human|Assistant|User|H|A):")
# Keys that say which answer is better.
_RANK = re.compile(
    r"winner|better|swapped|flipped|reversed|preference|preferred|verdict|(^|_)(tie|choice|vote|judge|rank)($|_)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Preferences:
    """Reads records with two answers. `template` is None if the tokenizer has none; then messages are an error."""

    prompt_field: str
    chosen_field: str
    rejected_field: str
    template: ChatTemplate | None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ignored_fields: Sequence[str] = ()

    @property
    def key(self) -> str:
        return self.chosen_field

    def passes_over(self, key: str, value: Any = None) -> bool:
        return key not in (*self._fields, *self.ignored_fields) and is_unread(key, value, self.reads(key))

    def reads(self, key: str) -> bool:
        return key in (*self._fields, *CONVERSATIONS) or may_matter(key) or bool(_RANK.search(key))

    @property
    def _fields(self) -> tuple[str, str, str]:
        return self.prompt_field, self.chosen_field, self.rejected_field

    def check_keys(self, keys: Collection[str]) -> None:
        for key, setting in ((self.chosen_field, "chosen_field"), (self.rejected_field, "rejected_field")):
            if key not in keys:
                raise BadRecordError(
                    f"no key {key!r} (it has {listed_keys(keys)}); set data.format.{setting} to the key"
                )

    def read(self, record: Mapping[str, Any]) -> AnswerPair:
        """The pair of a record. Raises `BadRecordError`, `EqualAnswersError`, and `UserError` for a fault of the
        template."""
        self.check_keys(record)
        record = without(record, self.ignored_fields)
        prompt, chosen, rejected = (as_messages(record.get(name)) for name in self._fields)
        if chosen is not None and chosen == rejected:
            raise EqualAnswersError
        if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
            chosen, rejected = ([{"role": ASSISTANT, "content": answer}] for answer in (chosen, rejected))
        if isinstance(chosen, list) and isinstance(rejected, list):
            pair = self._read_messages(prompt, chosen, rejected, record)
        else:
            pair = self._read_texts(prompt, chosen, rejected, record)
        if pair.chosen.text.strip() == pair.rejected.text.strip():  # such as in what the template leaves out
            raise EqualAnswersError
        return pair

    def _read_texts(self, prompt: Any, chosen: Any, rejected: Any, record: Mapping[str, Any]) -> AnswerPair:
        texts = (checked_text(chosen, self.chosen_field), checked_text(rejected, self.rejected_field))
        is_given = prompt not in (None, "")
        if not is_given:
            prompt = _common_text(*texts, needed=prompt is None)
            texts = (texts[0][len(prompt) :], texts[1][len(prompt) :])
        elif isinstance(prompt, list):
            raise BadRecordError(f"{self.prompt_field!r} is a list of messages, but {self.chosen_field!r} is text")
        prompt = checked_text(prompt, self.prompt_field)
        if are_lists(prompt, *texts):
            raise BadRecordError(
                f"{self.prompt_field!r} and the answers are JSON lists of texts, one for each turn; write them as "
                "messages"
            )
        if empty := [key for key, text in zip(self._fields[1:], texts, strict=True) if is_blank(text)]:
            raise BadRecordError(f"{empty[0]!r} is empty")
        for key, text in zip(self._fields[1:], texts, strict=True):
            check_reply(text, f"{key!r} ")
        refuse_others(record, (*self._fields, *SYSTEM, TOOLS, FUNCTIONS, *CONTEXT))
        _refuse_ranks(record, self._fields)
        refuse_context(record, self._fields, (prompt,), texts)
        if lost := [
            name for name, messages in conversations_of(record).items() if not is_inside(messages, (prompt, *texts))
        ]:
            raise BadRecordError(
                f"{lost[0]!r} is not read, and is not in the texts that are; set data.format.prompt_field to it and "
                "write the answers as messages, or add it to data.format.ignored_fields"
            )
        of_text = (
            InstructionText(
                text=prompt + text,
                targets=((len(prompt), len(prompt) + len(text)),),
                contents=(prompt, text),
                is_plain=True,
                repeats_prompt=is_given and repeats(text, prompt),
            )
            for text in texts
        )
        return AnswerPair(*of_text)

    def _read_messages(self, prompt: Any, chosen: list[Any], rejected: list[Any], record: Any) -> AnswerPair:
        if self.template is None:
            raise UserError(
                f"{self.chosen_field!r} has messages, but the tokenizer has no chat template; set "
                "data.format.chat_template, or use a tokenizer with one (`lmtrain tokenizer extend`)"
            )
        refuse_others(record, (*self._fields, *SYSTEM, TOOLS, FUNCTIONS, VARIABLES, *CONTEXT))
        _refuse_ranks(record, self._fields)
        if not (chosen and rejected):
            raise BadRecordError("an answer has no message")
        answers = [
            check_messages(messages, key, self.ignored_fields)
            for messages, key in ((chosen, self.chosen_field), (rejected, self.rejected_field))
        ]
        asked, answers = self._prompt_and_answers(prompt, answers)
        own = [*asked.messages, *(message for answer in answers for message in answer.messages)]
        refuse_context(record, (*self._fields, *SYSTEM, TOOLS, FUNCTIONS, VARIABLES, "prompt"), *texts_by_role(own))
        for name in CONVERSATIONS:
            if record.get(name):
                check_prompt(parsed(record[name], name), [*asked.messages, *answers[0].messages], name)
        asked = replace(asked, tools=tools_of(record), variables=variables_of(record))
        asked = asked.with_system(system_text(record))
        parts = []
        for answer in answers:
            if False in answer.marks:
                raise BadRecordError("a message of an answer is marked as no target, which pairs do not support")
            rendering = Rendering(self.template, asked + answer, self.variables)
            parts.append(rendering.as_text((rendering.answer(len(asked.messages)),)))
        return AnswerPair(*parts)

    def _prompt_and_answers(self, prompt: Any, answers: list[Conversation]) -> tuple[Conversation, list[Conversation]]:
        """The prompt's messages, and those of the answers after it."""
        messages = [answer.messages for answer in answers]
        if isinstance(prompt, list) and prompt:
            asked = check_messages(prompt, self.prompt_field, self.ignored_fields)
            repeated = repeated_in(asked.messages, messages, self.prompt_field)
        elif isinstance(prompt, str) and prompt.strip() and all(own[0]["role"] == ASSISTANT for own in messages):
            asked, repeated = check_messages([{"role": "user", "content": prompt}], self.prompt_field), 0
        elif prompt is None or isinstance(prompt, str | list):
            shared = _common(*([spoken(message) for message in own] for own in messages))
            if not shared and prompt not in (None, "", []):
                raise BadRecordError(
                    "one of the answers begins with a message of the user, the other does not; write "
                    f"{self.prompt_field!r} in both, or in none"
                )
            if not shared:
                raise BadRecordError(
                    "the answers have no message in common at their start; write the prompt under its key, "
                    "data.format.prompt_field"
                )
            check_prompt(prompt, messages[0][:shared], self.prompt_field)
            asked, repeated = (
                replace(answers[0], messages=messages[0][:shared], marks=answers[0].marks[:shared]),
                shared,
            )
        else:
            raise BadRecordError(f"{self.prompt_field!r} is {type(prompt).__name__}, not text or a list of messages")
        answers = [answer.after(repeated) for answer in answers]
        if any(answer.messages[-1]["role"] == "user" for answer in answers):
            raise BadRecordError("an answer ends with a message of the user, which would be learned; remove it")
        return asked, answers


def _refuse_ranks(record: Mapping[str, Any], read: Sequence[str]) -> None:
    """Raise `BadRecordError` for keys that say which answer is better, such as winner_model_b."""
    for name, value in record.items():
        # 0 or 1 next to answers of any name says which is better; next to chosen, that the pair is right
        is_number = name.lower() in ("label", "labels") and value in (0, 1) and read[1] != "chosen"
        if name not in read and (_RANK.search(name) or is_number) and value not in (None, ""):
            raise BadRecordError(
                f"{name!r} is not read: {read[1]!r} has the better answer of each record; write it there, or add the "
                "key to data.format.ignored_fields"
            )


def _common_text(chosen: str, rejected: str, needed: bool) -> str:
    """The prompt at the start of both texts, without a space at its end, which belongs to the answers."""
    prompt = chosen[: _common(chosen, rejected)].removesuffix(" ")
    rests = [text[len(prompt) :] for text in (chosen, rejected)]
    if (needed and not prompt) or any(map(_TURN.search, rests)):
        raise BadRecordError(
            "the answers have no prompt in common at their start; write it under its key, data.format.prompt_field"
        )
    if any(text.endswith(":") and other.startswith(text) for text, other in ((chosen, rejected), (rejected, chosen))):
        raise BadRecordError("one of the answers is empty")
    return prompt


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The length of what both have in common at their start; less than that of each, as in TRL."""
    if chosen == rejected:
        raise EqualAnswersError
    shortest = min(len(chosen), len(rejected)) - 1
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest)
