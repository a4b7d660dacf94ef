"""Rows with token ids, such as those of a tokenized dataset, and which of their tokens are targets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.preprocess.records import BadRecordError, TokenizedText, listed_keys

# Tokens with this label are no targets (torch's CrossEntropyLoss).
_IGNORED = -100
_LABELS, _PADDING = "labels", "attention_mask"
# 1 for targets: of Megatron and others, of TRL's completions, of chat templates in transformers.
_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")


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
        return key in (self.input_ids_field, _LABELS, _PADDING, *_MASKS)

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
        masks = [_same_length(record, name, ids) != 0 for name in _MASKS if record.get(name) is not None]
        if record.get(_LABELS) is not None:
            masks.append(_labelled(_same_length(record, _LABELS, ids), ids))
        if self.labelled is not None and bool(masks) != self.labelled:
            found, other = ("labels", "none") if masks else ("no labels", "some")
            raise BadRecordError(f"has {found}, but the first row of the source has {other}: make them two sources")
        targets = np.logical_and.reduce(masks) if masks else None
        if record.get(_PADDING) is None:
            return TokenizedText(ids, targets)
        real = _same_length(record, _PADDING, ids) != 0
        return TokenizedText(ids[real], None if targets is None else targets[real])


def _labelled(labels: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which tokens have a label. Labels are the ids of the same position, as in transformers."""
    is_target = labels != _IGNORED
    if (labels == ids)[is_target].all():
        return is_target
    shifted = is_target[:-1] & (labels[:-1] == ids[1:])
    advice = "they are those of the next token; shift them by one" if shifted.sum() == is_target[:-1].sum() else ""
    raise BadRecordError("labels must be the ids of the same positions, or -100" + (f": {advice}" if advice else ""))


def _same_length(record: Mapping[str, Any], name: str, ids: np.ndarray) -> np.ndarray:
    values = _integers(record[name], name)
    if len(values) != len(ids):
        raise BadRecordError(f"{name!r} has {len(values):,} numbers, but there are {len(ids):,} token ids")
    return values


def _integers(values: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or array.dtype.kind in "uib"):
            return array.astype(np.int64)
    except ValueError:
        pass
    raise BadRecordError(f"{name!r} is not a list of integers")
