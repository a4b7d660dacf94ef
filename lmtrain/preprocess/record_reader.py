"""Which reader the records of a source have, whether they have targets, and the reader of records with token ids."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.data.formats import CompletionFormat, PreferenceFormat, TextFormat, TokensFormat
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.preprocess.instructions import Completions, Conversations
from lmtrain.preprocess.preferences import Preferences
from lmtrain.preprocess.records import (
    TOKEN_MARKS,
    BadRecordError,
    Document,
    RecordReader,
    Texts,
    TokenIds,
    TokenizedText,
    is_held_out,
    listed_keys,
)
from lmtrain.preprocess.sources import AnySource
from lmtrain.preprocess.token_sources import TokenSource
from lmtrain.runtime.errors import UserError

if TYPE_CHECKING:
    from lmtrain.preprocess.documents import DocumentReader

# Rows with token ids, such as those of a tokenized dataset, and which of their tokens are targets.
#
# What else a row says of its tokens is either what lmtrain does anyway, or refused: numbers that change what is learned
# are never passed over.

# Tokens with this label are no targets (torch's CrossEntropyLoss).
_IGNORED = -100
_LABELS, _PADDING, *_MASKS = TOKEN_MARKS
_POSITIONS = "position_ids"
# The same number for all tokens of a row, which is one document.
_PARTS = ("token_type_ids", "segment_ids", "document_ids", "doc_ids", "sequence_ids", "seq_idx")
# Lengths or borders of the documents that a row consists of.
_BORDERS = (
    *("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths", "doc_lengths"),
    *("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_boundaries", "seq_start_id"),
)
_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "sample_weight", "token_weights")
# Names of the number of tokens of a prompt, such as prompt_length, n_prompt_tokens, response_start.
_PROMPT = re.compile(
    r"(prompt|source|context|instruction|input|response|completion|answer)s?_(tokens?_)?"
    r"(len|length|lens|lengths|size|start|starts|end|tokens|offset)(_(idx|index|pos|position))?$"
)
_INPUTS = ("decoder_input_ids", "pixel_values", "input_values", "input_features")
# Of each token, but not of what is learned.
_NO_EFFECT = ("special_tokens_mask", "offset_mapping", "word_ids")


@dataclass(frozen=True)
class TokenRows:
    """Reads rows of ids below `vocab_size`. `labelled` says whether rows have labels or masks; None: either."""

    input_ids_field: str
    vocab_size: int
    labelled: bool | None = None

    @property
    def key(self) -> str:
        return self.input_ids_field

    def reads(self, key: str) -> bool:
        return self.reads_all or key in self._columns or bool(_PROMPT.search(key))

    def passes_over(self, key: str, value: Any = None) -> bool:
        return key not in (*self._columns, *_NO_EFFECT) and not _PROMPT.search(key)

    @property
    def reads_all(self) -> bool:
        """Whether it looks at all keys: in the first row of a source, for lists of an unknown meaning."""
        return self.labelled is None

    @property
    def _columns(self) -> tuple[str, ...]:
        checked = (_POSITIONS, *_PARTS, *_BORDERS, *_WEIGHTS, *_INPUTS)
        return self.input_ids_field, _LABELS, _PADDING, *_MASKS, *checked

    def check_keys(self, keys: Collection[str]) -> None:
        if self.input_ids_field not in keys:
            raise BadRecordError(
                f"no key {self.input_ids_field!r} (it has {listed_keys(keys)}); set data.format.input_ids_field to the "
                "key of the token ids, or remove data.format if these are texts"
            )

    def read(self, record: Mapping[str, Any]) -> TokenizedText:
        """The ids and targets of a row, without padding. Raises `BadRecordError`."""
        self.check_keys(record)
        ids = _integers(record[self.input_ids_field], self.input_ids_field)
        if len(wrong := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise BadRecordError(f"token id {wrong[0]} is not in the vocabulary of {self.vocab_size:,} tokens")
        masks = [_mask(record, name, ids) for name in _MASKS if record.get(name) is not None]
        if record.get(_LABELS) is not None:
            masks.append(_labelled(_same_length(record, _LABELS, ids), ids))
        if self.labelled is not None and bool(masks) != self.labelled:
            found, other = ("labels", "none") if masks else ("no labels", "some")
            raise BadRecordError(f"has {found}, but the first row of the source has {other}: make them two sources")
        real = np.ones(len(ids), bool) if record.get(_PADDING) is None else _mask(record, _PADDING, ids)
        self._check_others(record, ids, real, bool(masks))
        targets = np.logical_and.reduce(masks)[real] if masks else None
        return TokenizedText(ids[real], targets)

    def _check_others(self, record: Mapping[str, Any], ids: np.ndarray, real: np.ndarray, has_masks: bool) -> None:
        """Raise `BadRecordError` for what changes the meaning of the tokens, and has no effect here.

        Raises `UserError`, for which a record is not skipped, for a list of unknown meaning.
        """
        given = {name for name, value in record.items() if value is not None}
        sizes = {len(ids), int(real.sum())}
        for name in (_POSITIONS, *_PARTS):
            if name in given:
                values = _same_length(record, name, ids)[real]
                right = np.arange(len(values)) if name == _POSITIONS else values[:1]
                if (values != right).any():
                    raise _several(name)
        for name in _BORDERS:
            borders = record[name] if isinstance(record.get(name), list) else [record.get(name)]
            if name in given and borders not in ([], [0], *([*zero, size] for zero in ([], [0]) for size in sizes)):
                raise _several(name)
        for name in _WEIGHTS:
            if name in given and not _is_all_one(record[name]):
                raise BadRecordError(f"{name!r} has weights other than 1, which are not supported; remove it")
        for name in given if not has_masks else ():
            if _PROMPT.search(name) and record[name]:
                raise BadRecordError(
                    f"{name!r} says which tokens are a prompt, but nothing that they are no targets; add labels or a "
                    "loss_mask, or remove it"
                )
        for name in _INPUTS:
            if name in given:
                raise BadRecordError(f"{name!r} is an input of another kind of model; remove it")
        if self.reads_all:
            for name in sorted(given - {*self._columns, *_NO_EFFECT}):
                if _is_of_each_token(record[name], len(ids)):
                    raise UserError(
                        f"{name!r} has a number for each token, whose meaning is unknown; name it labels or loss_mask "
                        "if it says which tokens are targets, or remove it"
                    )


def _several(name: str) -> BadRecordError:
    return BadRecordError(
        f"{name!r} is not that of a single document from its start; write a row for each document, or remove it"
    )


def _is_all_one(values: Any) -> bool:
    try:
        return bool((np.asarray(values, np.float64) == 1).all())
    except (TypeError, ValueError):
        return False


def _is_of_each_token(values: Any, number: int) -> bool:
    if not isinstance(values, list | np.ndarray) or len(values) != number or not number:
        return False
    return all(isinstance(value, int | float | np.number | np.bool_) for value in values)


def _labelled(labels: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which tokens have a label. Labels are the ids of the same position, as in transformers."""
    is_target = labels != _IGNORED
    if (labels == ids)[is_target].all():
        return is_target
    shifted = is_target[:-1] & (labels[:-1] == ids[1:])
    advice = "they are those of the next token; shift them by one" if shifted.sum() == is_target[:-1].sum() else ""
    raise BadRecordError("labels must be the ids of the same positions, or -100" + (f": {advice}" if advice else ""))


def _mask(record: Mapping[str, Any], name: str, ids: np.ndarray) -> np.ndarray:
    """A mask of 0 and 1, bool."""
    values = _array(record[name])
    if values is None or values.dtype.kind not in "uibf":
        raise BadRecordError(f"{name!r} is not a list of 0 and 1")
    if len(wrong := values[(values != 0) & (values != 1)]):
        what = "; numbers of documents are not supported, write a row for each" if name == _PADDING else ""
        raise BadRecordError(f"{name!r} has {wrong[0]}, but must have 0 and 1 only{what}")
    return _checked_length(values, name, ids) != 0


def _same_length(record: Mapping[str, Any], name: str, ids: np.ndarray) -> np.ndarray:
    return _checked_length(_integers(record[name], name), name, ids)


def _checked_length(values: np.ndarray, name: str, ids: np.ndarray) -> np.ndarray:
    if len(values) != len(ids):
        raise BadRecordError(f"{name!r} has {len(values):,} numbers, but there are {len(ids):,} token ids")
    return values


def _integers(values: Any, name: str) -> np.ndarray:
    array = _array(values)
    if array is None or array.dtype.kind not in "ui" or (isinstance(values, list) and bool in set(map(type, values))):
        raise BadRecordError(f"{name!r} is not a list of integers")
    if array.dtype == np.uint64 and len(array) and array.max() >= 1 << 63:
        raise BadRecordError(f"{name!r} has {array.max()}, which no integer of 8 bytes holds")
    return array.astype(np.int64)


def _array(values: Any) -> np.ndarray | None:
    """A list as an array; None if it is no list, or one of lists."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    if array.ndim != 1:
        return None
    return array if len(array) else array.astype(np.int64)


def record_reader(
    config: DataConfig, vocab_size: int, template: ChatTemplate | None = None, labelled: bool | None = None
) -> RecordReader:
    """The reader of the records of a source. `template` is for conversations and preferences only, and `labelled` for
    rows of token ids: whether they have labels, None for either."""
    if isinstance(config.format, TokensFormat):
        return TokenRows(config.format.input_ids_field, vocab_size, labelled)
    if isinstance(config.format, CompletionFormat):
        own = config.format
        return Completions(
            input_field=own.input_field,
            output_field=own.output_field,
            separate_with=own.separate_with,
            ignored_fields=own.ignored_fields,
        )
    if isinstance(config.format, TextFormat):
        if config.vocab_size is not None:
            return TokenIds(key=config.text_key, vocab_size=config.vocab_size)
        return Texts(config.text_key, config.text_documents)
    if isinstance(config.format, PreferenceFormat):
        fields = config.format.prompt_field, config.format.chosen_field, config.format.rejected_field
        return Preferences(*fields, template, config.format.chat_template_kwargs, config.format.ignored_fields)
    assert template is not None
    chat = config.format
    return Conversations(
        template=template,
        messages_field=chat.messages_field,
        loss_on=chat.loss_on,
        variables=chat.chat_template_kwargs,
        ignored_fields=chat.ignored_fields,
    )


def open_documents(
    source: AnySource,
    config: DataConfig,
    vocab_size: int,
    template: ChatTemplate | None = None,
    labelled: bool | None = None,
    split: str = "train",
) -> "DocumentReader":
    """The documents of a split of a source as its settings say; `template` and `labelled` are those of
    `record_reader`."""
    from lmtrain.preprocess.documents import DocumentReader  # which a finished cache does not need

    reader, skip_bad = record_reader(config, vocab_size, template, labelled), config.on_bad_record == "skip"
    fraction = config.validation_fraction

    def of_split(document: Document) -> bool:
        return fraction is None or is_held_out(document, fraction) == (split == "validation")

    return DocumentReader(source, reader, skip_bad, config.max_document_bytes, of_split)


def has_labels(sources: Sequence[AnySource], config: DataConfig, vocab_size: int) -> bool:
    """Whether documents have targets: conversations and completions do, and token ids if their first row has labels.

    Raises `UserError` if some files of token ids have targets and others do not.
    """
    if not isinstance(config.format, TokensFormat):
        return not isinstance(config.format, TextFormat)
    in_place = {source.label: source.info.targets is not None for source in sources if isinstance(source, TokenSource)}
    rows = [source for source in sources if not isinstance(source, TokenSource)]
    found = in_place | ({rows[0].label: _first_has_labels(rows[0], config, vocab_size)} if rows else {})
    if len(set(found.values())) > 1:
        labelled, other = (next(name for name, value in found.items() if value is wanted) for wanted in (True, False))
        raise UserError(f"{labelled} has labels, but {other} has none: make them two sources in data.configs")
    return any(found.values())


def _first_has_labels(source: AnySource, config: DataConfig, vocab_size: int) -> bool:
    _, first = next(iter(open_documents(source, config, vocab_size)), (0, None))
    return isinstance(first, TokenizedText) and first.targets is not None
