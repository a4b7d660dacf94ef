"""Documents that `lmtrain preprocess --drop` and `--drop-duplicates` leave out of a cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Dropped:
    """Documents of one split of a source to leave out. `recipe` says why, and is part of the cache's recipe;
    `documents`: which ones, by the number of the shard, bool [documents]."""

    recipe: dict[str, Any]
    documents: Mapping[int, np.ndarray] = field(default_factory=dict)
