"""The token caches of a run, and how far they carry it."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.data.config import DataConfig
from lmtrain.data.mirror import Mirror, warn_if_small
from lmtrain.data.mixture import Mixture, Phase
from lmtrain.data.shards import Shards
from lmtrain.data.token_store import TokenStore, check_file
from lmtrain.data.windows import num_train_windows
from lmtrain.runtime.storage import is_url


@dataclass(frozen=True)
class Cache:
    """One split of one source, complete or being built. `sources` is what each shard is made of."""

    folder: str
    recipe: Mapping[str, Any]
    sources: Sequence[Mapping[str, Any]]
    dtype: str
    shards: Shards

    @property
    def identity(self) -> dict[str, Any]:
        """What the tokens and their order follow from; known before there are any. Where the text lies is not in it."""
        parts = [{name: value for name, value in s.items() if name not in ("url", "id")} for s in self.sources]
        return {"recipe": self.recipe, "sources": parts}


@dataclass(frozen=True)
class Caches:
    """Those of a run, by the names of their sources; a run with one source calls it ""."""

    train: Mapping[str, Cache]
    validation: Mapping[str, Cache]

    @property
    def identity(self) -> str:
        """A hash of what the training tokens follow from, which a resumed run must find unchanged."""
        parts = {name: cache.identity for name, cache in self.train.items()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def open_store(config: DataConfig, cache: Cache) -> TokenStore:
    """The tokens of a cache. Raises `UserError` if shards of it are missing or damaged."""
    if is_url(cache.folder):
        mirror = Mirror(cache.folder, config.mirror_dir, config.max_mirror_bytes)
        mirror.fetch_ahead(cache.shards)
        if config.shuffle is True:
            warn_if_small(cache.folder, cache.shards, config.max_mirror_bytes)
        return TokenStore(cache.folder, cache.shards, cache.dtype, mirror.locate)
    for info in list(cache.shards.infos):
        check_file(os.path.join(cache.folder, info.file), info)
    return TokenStore(cache.folder, cache.shards, cache.dtype, lambda info: os.path.join(cache.folder, info.file))


def needs_all(config: DataConfig, epoch: int) -> str | None:
    """Why the order of the data cannot be known before the training caches are complete; None if it can."""
    if config.shuffle is True:
        return "data.shuffle true needs the whole cache (a number shuffles within stretches, and starts early)"
    if epoch:
        return "epoch needs to know how much data there is"
    if config.configs is not None and config.stop_strategy == "first_exhausted":
        return "data.stop_strategy first_exhausted needs to know how much data there is"
    return None


def plan_mixture(config: DataConfig, names: list[str], batch_sizes: BatchSizes, seed: int) -> Mixture | None:
    """The mixture of the sources `names`, None for a single one. Raises `UserError` for a weight of a source without
    training text."""
    if config.configs is None:
        return None
    weights = config.train_weights
    if weights is None:
        weights = dict.fromkeys(names, 1.0)
    changes = [(0, weights)] if isinstance(weights, dict) else weights
    for _, shares in changes:
        for name, share in shares.items():
            if share and name not in names:
                raise UserError(f"data.train_weights: {name!r} has a weight, but no training text")
    phases = [
        Phase(batch_sizes.before(step), tuple(shares.get(name, 0.0) for name in names)) for step, shares in changes
    ]
    return Mixture(phases, seed)


def check_batch(config: DataConfig, caches: Caches, seq_len: int, batch_sizes: BatchSizes) -> None:
    """Raise `UserError` if a batch takes more sequences than there are: it would hold the same text twice."""
    if config.configs is not None:
        return
    (cache,) = caches.train.values()
    sequences, largest = num_train_windows(cache.shards.tokens, seq_len), max(batch_sizes.all)
    if cache.shards.complete and 0 < sequences < largest:
        raise UserError(
            f"trainer.train_batch_size: {largest:,} sequences of {seq_len:,} tokens, but {cache.folder} has "
            f"{sequences:,} ({cache.shards.tokens:,} tokens); set it to {sequences:,} at most, lower model.seq_len, or "
            "add text"
        )


def describe_epochs(
    config: DataConfig, caches: Mapping[str, Cache], seq_len: int, batch_sizes: BatchSizes
) -> list[str]:
    """For each source, after how many steps all of its text has been trained on once, at its first share."""
    weights = config.train_weights
    first = dict.fromkeys(caches, 1.0) if weights is None else weights if isinstance(weights, dict) else weights[0][1]
    whole = sum(first.get(name, 0.0) for name in caches)
    lines = []
    for name, cache in caches.items():
        share = first.get(name, 0.0) / whole if name else 1.0
        if not share:
            lines.append(f"{name} has no share of the first step")
            continue
        sequences = num_train_windows(cache.shards.tokens, seq_len)
        steps = f"{batch_sizes.whole_steps(int(sequences / share)):,} steps"
        of = f" of {name} ({100 * share:.3g} % of the examples)" if name else ""
        lines.append(f"one epoch{of} is {steps if cache.shards.complete else f'not known yet, {steps} so far'}")
    return lines


def plan_steps(
    config: DataConfig,
    caches: Caches,
    seq_len: int,
    batch_sizes: BatchSizes,
    num_train_steps: int,
    epoch: int,
    seed: int,
) -> int:
    """Steps of the run: `num_train_steps`, or fewer if the data is to end it."""
    if needs_all(config, epoch) is None:
        return num_train_steps
    windows = [num_train_windows(cache.shards.tokens, seq_len) for cache in caches.train.values()]
    mixture = plan_mixture(config, list(caches.train), batch_sizes, seed)
    if mixture is None:
        return min(num_train_steps, batch_sizes.whole_steps(epoch * windows[0])) if epoch else num_train_steps
    if config.stop_strategy == "first_exhausted":
        examples = mixture.examples_within(windows, batch_sizes.before(num_train_steps))
        return min(num_train_steps, batch_sizes.whole_steps(examples))
    return num_train_steps
