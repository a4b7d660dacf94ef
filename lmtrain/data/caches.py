"""The finished token caches of a run, and how far they carry it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.manifest import Manifest
from lmtrain.data.mixture import Mixture, Phase
from lmtrain.data.windows import num_train_windows


@dataclass(frozen=True)
class Cache:
    """One finished split of one source."""

    folder: str
    manifest: Manifest


@dataclass(frozen=True)
class Caches:
    """Those of a run, by the names of their sources; a run with one source calls it ""."""

    train: Mapping[str, Cache]
    validation: Mapping[str, Cache]

    @property
    def identity(self) -> str:
        """A hash of the training tokens, which a resumed run must find unchanged."""
        parts = {name: cache.manifest.identity for name, cache in self.train.items()}
        value: Any = parts[""] if parts.keys() == {""} else parts
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def plan_mixture(config: DataConfig, names: list[str], batch_size: int, seed: int) -> Mixture | None:
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
    phases = [Phase(step * batch_size, tuple(shares.get(name, 0.0) for name in names)) for step, shares in changes]
    return Mixture(phases, seed)


def plan_steps(
    config: DataConfig, caches: Caches, seq_len: int, batch_size: int, num_train_steps: int, epoch: int, seed: int
) -> int:
    """Steps of the run: `num_train_steps`, or fewer if the data is to end it."""
    windows = [num_train_windows(cache.manifest.tokens, seq_len) for cache in caches.train.values()]
    mixture = plan_mixture(config, list(caches.train), batch_size, seed)
    if mixture is None:
        return min(num_train_steps, epoch * windows[0] // batch_size) if epoch else num_train_steps
    if config.stop_strategy == "first_exhausted":
        return min(num_train_steps, mixture.examples_within(windows, num_train_steps * batch_size) // batch_size)
    return num_train_steps
