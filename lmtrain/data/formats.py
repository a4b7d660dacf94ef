"""Settings of what the records of a source are: text, conversations, completions, preferences, or token ids."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Tag

from lmtrain.config.section import FreeText, RawText, Section, by_type, identity
from lmtrain.hf.config import RENDERER_NAMES

TooLong = Literal["cut", "drop"]
Pack = Literal["first_fit", "best_fit"]


class TextFormat(Section):
    """Records with a text, all of whose tokens are targets."""

    type: Literal["text"] = identity("text", description="Kind of record")


def _chat_template() -> Any:
    return identity(
        None,
        min_length=1,
        description="Chat template: a Jinja file, the name of one of the tokenizer's templates, or its text; "
        "null: the tokenizer's own",
    )


def _ignored_fields() -> Any:
    return identity(
        [],
        description="Keys of records and messages that are passed over, whatever they look like",
    )


def _template_variables() -> Any:
    return identity({}, description="Variables for the template; a record's own chat_template_kwargs take precedence")


def _checked_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Raise an error for variables that are set for each conversation."""
    if used := sorted(RENDERER_NAMES & variables.keys()):
        raise ValueError(f"{', '.join(used)}: set for each conversation; choose another name")
    return variables


_Variables = Annotated[dict[str, Any], AfterValidator(_checked_variables)]


class ChatFormat(Section):
    """Records with a conversation, a list of messages {role, content}, written by a chat template."""

    type: Literal["chat"] = identity("chat", description="Kind of record")
    messages_field: RawText = identity(
        "messages", min_length=1, description="Key of the list of messages in each record"
    )
    chat_template: RawText | None = _chat_template()
    chat_template_kwargs: _Variables = _template_variables()
    ignored_fields: list[RawText] = _ignored_fields()
    loss_on: Literal["assistant", "all", "last"] = identity(
        "assistant", description="Targets: tokens of the assistant's messages, of all messages, or of its last message"
    )
    too_long: TooLong = identity(
        "cut", description="Action for a conversation longer than seq_len: cut off its end, or drop it"
    )


class CompletionFormat(Section):
    """Records with a prompt and its completion, whose tokens are the targets, followed by an EOS token."""

    type: Literal["completion"] = identity("completion", description="Kind of record")
    input_field: RawText = identity("prompt", min_length=1, description="Key of the prompt in each record")
    output_field: RawText = identity("completion", min_length=1, description="Key of the completion in each record")
    separate_with: FreeText = identity("", description="Text between prompt and completion; not a target")
    ignored_fields: list[RawText] = _ignored_fields()
    too_long: TooLong = identity(
        "cut", description="Action for a record longer than seq_len: cut off its end, or drop it"
    )


class PreferenceFormat(Section):
    """Records with two answers to a prompt, of which one is preferred; each as a text, or as a list of messages.

    The tokens of the answers are the targets. Texts are followed by an EOS token, messages are written by the chat
    template. Both answers of a pair are read in one sequence, as two documents.
    """

    type: Literal["preference"] = identity("preference", description="Kind of record")
    prompt_field: RawText = identity(
        "prompt",
        min_length=1,
        description="Key of the prompt in each record; in a record without it, the prompt is what both answers have in "
        "common at their start",
    )
    chosen_field: RawText = identity("chosen", min_length=1, description="Key of the preferred answer in each record")
    rejected_field: RawText = identity("rejected", min_length=1, description="Key of the other answer in each record")
    chat_template: RawText | None = _chat_template()
    chat_template_kwargs: _Variables = _template_variables()
    ignored_fields: list[RawText] = _ignored_fields()
    too_long: TooLong = identity(
        "cut",
        description="Action for a pair whose answers are together longer than seq_len: cut off the end of the longer "
        "answer, then of both, or drop the pair",
    )


class TokensFormat(Section):
    """Token ids that exist already, of the tokenizer `data.tokenizer`; no EOS or BOS token is added.

    Files of ids (.bin, .npy) and token caches are read in place; rows with ids (.parquet, .arrow, .jsonl, datasets) are
    converted once. Tokens are targets according to labels or masks in the rows, all of them without any.
    """

    type: Literal["tokens"] = identity("tokens", description="Kind of record")
    dtype: Literal["uint16", "uint32"] | None = identity(
        None, description="Type of the ids in files that have no header; null: uint16"
    )
    eos_id: int | None = identity(
        None, ge=0, description="Id between documents in files without an index; null: the tokenizer's EOS token"
    )
    eos_at: Literal["first", "last"] | None = identity(
        None,
        description="Place of that id in each document; null: first in files with the header of llm.c, last in others",
    )
    input_ids_field: RawText = identity("input_ids", min_length=1, description="Key of the list of ids in each row")
    too_long: TooLong = identity(
        "cut", description="Action for a row with labels longer than seq_len: cut off its end, or drop it"
    )


FormatConfig = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ChatFormat, Tag("chat")]
    | Annotated[CompletionFormat, Tag("completion")]
    | Annotated[PreferenceFormat, Tag("preference")]
    | Annotated[TokensFormat, Tag("tokens")],
    by_type("text"),
]
