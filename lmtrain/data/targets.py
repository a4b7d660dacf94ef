"""Checks that a run has something to learn from: documents, and target tokens in its first sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmtrain.data.cache_manifest import ShardInfo, count_documents
from lmtrain.data.caches import Cache, packed_windows
from lmtrain.data.config import DataConfig
from lmtrain.runtime.errors import UserError

# Sequences that are read at once.
_SEQUENCES_READ = 64
_MAX_SHOWN = 3


def check_contents(folder: str, shards: Sequence[ShardInfo], recipe: Mapping[str, Any]) -> None:
    """Raise `UserError` if a complete cache has no documents, or none with a target token."""
    labels = list(dict.fromkeys(str(shard.source["url"]) for shard in shards))
    sources = ", ".join(labels[:_MAX_SHOWN]) + (
        f" and {len(labels) - _MAX_SHOWN} more" if len(labels) > _MAX_SHOWN else ""
    )
    documents, tokens = count_documents(shards), sum(shard.tokens for shard in shards)
    if documents == 0 or (documents is None and not tokens):
        skipped = sum(shard.skipped for shard in shards)
        reason = f"all {skipped:,} records are bad and were skipped" if skipped else "empty, or blank lines only"
        raise UserError(
            f"{folder}: no documents in {sources}: {reason}; remove the source, or delete the cache folder "
            "after adding text to it"
        )
    settings = recipe["documents"].get("format")
    if settings is not None and not any(shard.targets for shard in shards):
        raise UserError(
            f"{folder}: none of the {documents or 0:,} documents in {sources} has a target token, so nothing would be "
            f"learned: {_reason(settings)}; then delete the cache folder to build it again"
        )


def _reason(settings: Mapping[str, Any]) -> str:
    if settings["type"] == "tokens":
        return "all labels are -100, or all masks 0; check the labels and masks of the rows"
    if settings["type"] == "completion":
        return "completions have no tokens; check data.format.output_field"
    if settings["type"] == "preference":
        return "the answers have no tokens; check data.format.chosen_field and rejected_field"
    return (
        "no conversation has a message from the assistant that the chat template writes; check the roles of the "
        "messages and data.format.chat_template, or set data.format.loss_on: all"
    )


class FirstTargets:
    """Looks for a target token in the first sequences of a cache, complete or being built.

    `limit` is the number of sequences; None: `data.max_sequences_without_targets`.
    """

    def __init__(self, config: DataConfig, cache: Cache, seq_len: int, limit: int | None = None):
        self._config = config
        self._cache = cache
        self._seq_len = seq_len
        self._limit = limit or config.max_sequences_without_targets
        self._without = 0
        self._has_target = False

    def found(self) -> bool:
        """Whether there is one; False: none in the sequences so far, and more are expected.

        Raises `UserError` if there is none.
        """
        if self._has_target:
            return True
        complete = self._cache.shards.complete  # before packing, since the last shard may be added in between
        if complete:
            check_contents(self._cache.folder, self._cache.shards.infos, self._cache.recipe)
        if not self._cache.has_targets:  # in text all tokens are targets
            self._has_target = True
            return True
        windows = packed_windows(self._config, self._cache, self._seq_len)
        known = min(windows.for_training(), self._limit)
        while self._without < known and not self._has_target:
            numbers = np.arange(self._without, min(self._without + _SEQUENCES_READ, known))
            self._has_target = windows.have_target(numbers)
            self._without += len(numbers)
        if not self._has_target and (complete or known == self._limit):
            raise UserError(self._explain(known, windows.too_long))
        return self._has_target

    def _explain(self, known: int, too_long: int) -> str:
        cache, seq_len = self._cache, self._seq_len
        if too_long:
            action = "are cut off before their targets" if cache.too_long == "cut" else "are dropped"
            why = (
                f"{too_long:,} documents are longer than model.seq_len {seq_len:,} and {action}: increase "
                "model.seq_len, or shorten the documents"
            )
        else:
            why = "the documents at its start have none: check them, or increase data.max_sequences_without_targets"
        source = next((str(source["url"]) for source in cache.sources), "")
        return (
            f"{cache.folder} ({source}): no target token in the first {known:,} sequences, so nothing would be "
            f"learned; {why}"
        )
