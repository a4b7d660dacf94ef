"""Token caches of a run, and the number of steps they last."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.data.cache_manifest import has_pairs, shard_path
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TooLong
from lmtrain.data.mirror import Mirror, warn_if_small
from lmtrain.data.mixture import Mixture
from lmtrain.data.packing import PackedWindows
from lmtrain.data.pairs import packed_windows_of
from lmtrain.data.shards import Shards
from lmtrain.data.token_store import TokenStore, check_file
from lmtrain.runtime.storage import is_url


@dataclass(frozen=True, eq=False)
class Cache:
    """Token cache of one split of one source, complete or being built. `sources` has the source of each shard.

    `too_long` is the setting of `ChatFormat`, None for text. `packed` has the windows that were computed, by length.
    """

    folder: str
    recipe: dict[str, Any]
    sources: Sequence[Mapping[str, Any]]
    dtype: str
    shards: Shards
    too_long: TooLong | None = None
    packed: dict[int, PackedWindows] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_targets(self) -> bool:
        """Whether it holds conversations or completions."""
        return self.too_long is not None

    @property
    def has_pairs(self) -> bool:
        """Whether it holds pairs of answers."""
        return has_pairs(self.recipe)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the tokens and their order; known before any are built. Excludes the location of the text
        and the checksums that are known when it has been read."""
        place = ("url", "id", "modified", "sample", "sha256", "files")
        parts = [{name: value for name, value in s.items() if name not in place} for s in self.sources]
        return {"recipe": self.recipe, "sources": parts}


@dataclass(frozen=True)
class Caches:
    """All caches of a run by source name; the name is "" in a run with one source."""

    train: Mapping[str, Cache]
    validation: Mapping[str, Cache]

    @property
    def identity(self) -> str:
        """Hash of what determines the training tokens; a resumed run must find it unchanged."""
        parts = {name: cache.identity for name, cache in self.train.items()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def open_store(config: DataConfig, cache: Cache) -> TokenStore:
    """Open the tokens of a cache. Raises `UserError` if shards are missing or corrupt."""
    infos = list(cache.shards.infos)
    paths = [shard_path(cache.folder, info) for info in infos]
    if is_url(cache.folder) or any(map(is_url, paths)):
        mirror = Mirror(cache.folder, config.mirror_dir, config.max_mirror_bytes)
        mirror.fetch_ahead(cache.shards)
        if config.shuffle is True:
            warn_if_small(cache.folder, cache.shards, config.max_mirror_bytes)
        return TokenStore(cache.folder, cache.shards, cache.dtype, mirror.locate, cache.too_long, cache.has_pairs)
    for path, info in zip(paths, infos, strict=True):
        check_file(path, info)
    return TokenStore(
        cache.folder,
        cache.shards,
        cache.dtype,
        lambda info: shard_path(cache.folder, info),
        cache.too_long,
        cache.has_pairs,
    )


def num_windows(config: DataConfig, cache: Cache, seq_len: int) -> int:
    """Number of windows of a cache that training reads, so far."""
    if not cache.has_targets:
        return cache.shards.tokens // seq_len
    return packed_windows(config, cache, seq_len).for_training()


def packed_windows(config: DataConfig, cache: Cache, seq_len: int) -> PackedWindows:
    """The windows of a cache with targets, so far. The lengths of all its documents are read for it, once."""
    if seq_len not in cache.packed:
        cache.packed[seq_len] = packed_windows_of(open_store(config, cache), seq_len)
    cache.packed[seq_len].for_training()
    return cache.packed[seq_len]


def needs_all(config: DataConfig, epoch: int, needs_reference: bool = False) -> str | None:
    """Reason why training cannot start until the training caches are complete; None if it can.

    `needs_reference`: the objective compares answers with a reference.
    """
    if config.shuffle is True:
        return "data.shuffle true requires the complete cache (a number shuffles within blocks and starts earlier)"
    if epoch:
        return "epoch requires the total number of tokens"
    if config.configs is not None and config.stop_strategy == "first_exhausted":
        return "data.stop_strategy first_exhausted requires the total number of tokens"
    if needs_reference:
        return "the reference of all answers is computed before the first step"
    return None


def build_mixture(config: DataConfig, names: list[str], batch_sizes: BatchSizes, seed: int) -> Mixture | None:
    """Mixture of the sources `names`; None for a single source.

    Raises `UserError` if a source without training text has a weight.
    """
    if config.configs is None:
        return None
    phases = []
    for step, weights in config.weight_changes(names):
        for name, weight in weights.items():
            if weight and name not in names:
                raise UserError(f"data.train_weights: {name!r} has a weight, but no training text")
        phases.append((batch_sizes.before(step), tuple(weights.get(name, 0.0) for name in names)))
    return Mixture(phases, seed)


def check_batch(config: DataConfig, caches: Caches, seq_len: int, batch_sizes: BatchSizes) -> None:
    """Raise `UserError` if a batch is larger than the data, since it would hold the same text twice."""
    if config.configs is not None:
        return
    (cache,) = caches.train.values()
    sequences, largest = num_windows(config, cache, seq_len), max(batch_sizes.all)
    if cache.shards.complete and 0 < sequences < largest:
        raise UserError(
            f"trainer.train_batch_size: {counted(largest, 'sequence')} of {seq_len:,} tokens, but {cache.folder} has "
            f"{sequences:,} ({cache.shards.tokens:,} tokens); set it to {sequences:,} at most, lower model.seq_len, or "
            "add text"
        )


def describe_epochs(
    config: DataConfig, caches: Mapping[str, Cache], seq_len: int, batch_sizes: BatchSizes
) -> list[str]:
    """One line for each source: the number of steps in one epoch at its first weight."""
    _, first = config.weight_changes(caches)[0]
    total = sum(first.get(name, 0.0) for name in caches)
    lines = []
    for name, cache in caches.items():
        share = first.get(name, 0.0) / total if name else 1.0
        if not share:
            lines.append(f"{name} has weight 0 at the first step")
            continue
        sequences = num_windows(config, cache, seq_len)
        steps = counted(batch_sizes.whole_steps(int(sequences / share)), "step")
        of = f" of {name} ({100 * share:.3g} % of the examples)" if name else ""
        line = f"one epoch{of} is {steps if cache.shards.complete else f'not known yet, {steps} so far'}"
        lines.append(line + _describe_targets(config, cache, seq_len))
    return lines


def _describe_targets(config: DataConfig, cache: Cache, seq_len: int) -> str:
    """How many tokens are targets, and how many documents are longer than a window; empty for text."""
    if not cache.has_targets:
        return ""
    targets = sum(info.targets or 0 for info in cache.shards.infos)
    text = f"; {targets:,} of {cache.shards.tokens:,} tokens are targets"
    long = packed_windows(config, cache, seq_len).too_long
    done = {"cut": "cut off there", "drop": "dropped"}[cache.too_long or "cut"]
    what = "pair" if cache.has_pairs else "document"
    return f"{text}; {counted(long, what)} longer than {seq_len:,} tokens, {done}" if long else text


def choose_steps(
    config: DataConfig,
    caches: Caches,
    seq_len: int,
    batch_sizes: BatchSizes,
    num_train_steps: int,
    epoch: int,
    seed: int,
) -> int:
    """Number of steps of the run: `num_train_steps`, or fewer if the end of the data ends the run."""
    if needs_all(config, epoch) is None:
        return num_train_steps
    windows = [num_windows(config, cache, seq_len) for cache in caches.train.values()]
    mixture = build_mixture(config, list(caches.train), batch_sizes, seed)
    if mixture is None:
        return min(num_train_steps, batch_sizes.whole_steps(epoch * windows[0])) if epoch else num_train_steps
    if config.stop_strategy == "first_exhausted":
        examples = mixture.examples_within(windows, batch_sizes.before(num_train_steps))
        return min(num_train_steps, batch_sizes.whole_steps(examples))
    return num_train_steps
