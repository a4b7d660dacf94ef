"""Optional features of attention, as arguments of a kernel."""

from dataclasses import dataclass

import jax
import numpy as np

from lmtrain.models.attention.attend import Drop


@dataclass(frozen=True)
class Options:
    """Optional features of attention, as in `attend`: `segments` are those of the keys, [B, T]. Scores with slopes have
    no cap.

    `first_query`, an int32 scalar, is the position of the first query, if queries are only a part of the sequence; None
    if they are all of it. `block_size` in tokens is for kernels that use one.
    """

    upcast: bool = False
    drop: Drop | None = None
    segments: jax.Array | None = None
    window: int | None = None
    cap: float | None = None
    slopes: np.ndarray | jax.Array | None = None
    first_query: jax.Array | None = None
    block_size: int | None = None

    @property
    def features(self) -> dict[str, bool]:
        """Which of the features of `names.FEATURES` that change the result are in use."""
        return {
            "dropout": self.drop is not None,
            "cap": self.cap is not None,
            "alibi": self.slopes is not None,
            "upcast": self.upcast,
            "segments": self.segments is not None,
            "window": self.window is not None,
            "part": self.first_query is not None,
        }

    def of_queries(self, by_key_BT: jax.Array, length: int) -> jax.Array:
        """The part [B, S] of `length` queries of an array by position."""
        if self.first_query is None:
            return by_key_BT
        return jax.lax.dynamic_slice_in_dim(by_key_BT, self.first_query, length, axis=1)
