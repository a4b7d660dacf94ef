"""Which reader the records of a source have."""

from lmtrain.data.config import DataConfig
from lmtrain.data.formats import CompletionFormat, PreferenceFormat, TextFormat, TokensFormat
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.preprocess.instructions import Completions, Conversations
from lmtrain.preprocess.preferences import Preferences
from lmtrain.preprocess.records import RecordReader, Texts, TokenIds
from lmtrain.preprocess.token_rows import TokenRows


def record_reader(
    config: DataConfig, vocab_size: int, template: ChatTemplate | None = None, labelled: bool | None = None
) -> RecordReader:
    """The reader of the records of a source. `template` is for conversations and preferences only, and `labelled` for
    rows of token ids: whether they have labels, None for either."""
    if isinstance(config.format, TokensFormat):
        return TokenRows(config.format.input_ids_field, vocab_size, labelled)
    if isinstance(config.format, CompletionFormat):
        own = config.format
        return Completions(own.input_field, own.output_field, own.separate_with, own.ignored_fields)
    if isinstance(config.format, TextFormat):
        if config.vocab_size is not None:
            return TokenIds(config.text_key, vocab_size=config.vocab_size)
        return Texts(config.text_key, config.text_documents)
    if isinstance(config.format, PreferenceFormat):
        fields = config.format.prompt_field, config.format.chosen_field, config.format.rejected_field
        return Preferences(*fields, template, config.format.chat_template_kwargs, config.format.ignored_fields)
    assert template is not None
    chat = config.format
    return Conversations(template, chat.messages_field, chat.loss_on, chat.chat_template_kwargs, chat.ignored_fields)
