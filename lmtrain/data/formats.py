"""Settings of what the records of a source are: text, conversations, or prompts with completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from lmtrain.config.base import Section, by_type

TooLong = Literal["cut", "drop"]


class TextFormat(Section):
    """Records with a text, all of whose tokens are targets."""

    type: Literal["text"] = Field("text", description="Kind of record")


class ChatFormat(Section):
    """Records with a conversation, a list of messages {role, content}, written by a chat template."""

    type: Literal["chat"] = Field("chat", description="Kind of record")
    messages_field: str = Field("messages", min_length=1, description="Key of the list of messages in each record")
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template: a Jinja file, the name of one of the tokenizer's templates, or its text; "
        "null: the tokenizer's own",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables for the template; a record's own chat_template_kwargs take precedence"
    )
    loss_on: Literal["assistant", "all", "last"] = Field(
        "assistant", description="Targets: tokens of the assistant's messages, of all messages, or of its last message"
    )
    too_long: TooLong = Field(
        "cut", description="Action for a conversation longer than seq_len: cut off its end, or drop it"
    )


class CompletionFormat(Section):
    """Records with a prompt and its completion, whose tokens are the targets, followed by an EOS token."""

    type: Literal["completion"] = Field("completion", description="Kind of record")
    input_field: str = Field("prompt", min_length=1, description="Key of the prompt in each record")
    output_field: str = Field("completion", min_length=1, description="Key of the completion in each record")
    separate_with: str = Field("", description="Text between prompt and completion; not a target")
    too_long: TooLong = Field("cut", description="Action for a record longer than seq_len: cut off its end, or drop it")


FormatConfig = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ChatFormat, Tag("chat")]
    | Annotated[CompletionFormat, Tag("completion")],
    by_type("format", "text", ["text", "chat", "completion"]),
]
