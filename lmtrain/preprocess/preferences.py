"""Pairs of answers to a prompt, of which one is preferred, in the forms that TRL reads.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                  texts
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}   messages, written by the chat template
    {"chosen": ..., "rejected": ...}                                       with the prompt at the start of both answers

As in TRL, a prompt that is a text next to answers that are messages is ignored: the messages have it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.preprocess.instructions import TOOLS, VARIABLES, Rendering
from lmtrain.preprocess.messages import check_messages
from lmtrain.preprocess.records import AnswerPair, BadRecordError, InstructionText, checked_text, listed_keys


@dataclass(frozen=True)
class Preferences:
    """Reads records with two answers. `template` is None if the tokenizer has none; then messages are an error."""

    prompt_field: str
    chosen_field: str
    rejected_field: str
    template: ChatTemplate | None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read."""
        return self.chosen_field, self.rejected_field, self.prompt_field, TOOLS, VARIABLES

    def check_keys(self, keys: Collection[str]) -> None:
        for key, setting in ((self.chosen_field, "chosen_field"), (self.rejected_field, "rejected_field")):
            if key not in keys:
                raise BadRecordError(
                    f"no key {key!r} (it has {listed_keys(keys)}); set data.format.{setting} to the key"
                )

    def read(self, record: Mapping[str, Any]) -> AnswerPair:
        """The pair of a record. Raises `BadRecordError`, and `UserError` for a fault of the template."""
        self.check_keys(record)
        chosen, rejected = record[self.chosen_field], record[self.rejected_field]
        prompt = record.get(self.prompt_field)
        if isinstance(chosen, list) and isinstance(rejected, list):
            return self._read_messages(prompt, chosen, rejected, record)
        texts = (checked_text(chosen, self.chosen_field), checked_text(rejected, self.rejected_field))
        if prompt is None:
            prompt = _common_text(*texts)
            texts = (texts[0][len(prompt) :], texts[1][len(prompt) :])
        elif isinstance(prompt, list):
            raise BadRecordError(f"{self.prompt_field!r} is a list of messages, but {self.chosen_field!r} is text")
        prompt = checked_text(prompt, self.prompt_field)
        of_text = (
            InstructionText(prompt + text, ((len(prompt), len(prompt) + len(text)),), (prompt, text), is_plain=True)
            for text in texts
        )
        return AnswerPair(*of_text)

    def _read_messages(self, prompt: Any, chosen: list[Any], rejected: list[Any], record: Any) -> AnswerPair:
        if self.template is None:
            raise UserError(
                f"{self.chosen_field!r} has messages, but the tokenizer has no chat template; set "
                "data.format.chat_template, or use a tokenizer with one (`lmtrain tokenizer extend`)"
            )
        asked = prompt if isinstance(prompt, list) else []
        conversations = [
            check_messages(asked + chosen, self.chosen_field),
            check_messages(asked + rejected, self.rejected_field),
        ]
        shared = len(asked) or _common(*conversations)
        if not shared:
            raise BadRecordError("the answers have no message in common at their start; write the prompt under its key")
        if shared == min(map(len, conversations)):
            raise BadRecordError("an answer has no message")
        parts = []
        for messages in conversations:
            rendering = Rendering.of(self.template, messages, record, self.variables)
            parts.append(rendering.as_text((rendering.answer(shared),)))
        return AnswerPair(*parts)


def _common_text(chosen: str, rejected: str) -> str:
    """The prompt at the start of both texts, without a space at its end, which belongs to the answers."""
    if prompt := chosen[: _common(chosen, rejected)].removesuffix(" "):
        return prompt
    raise BadRecordError("the answers have no prompt in common at their start; write it under its key")


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The length of what both have in common at their start; less than that of each, as in TRL."""
    if chosen == rejected:
        raise BadRecordError(
            "both answers are equal, so it is unknown where they begin; write the prompt under its key"
        )
    shortest = min(len(chosen), len(rejected)) - 1
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest)
