"""Plain attention, compiled by XLA: supports everything; memory grows with the square of the length."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.attention.attend import Options, attend
from lmtrain.models.attention.kernel import Kernel, all_but
from lmtrain.models.layers.remat import SAVED_ATTENTION

# Sequences up to this length are not halved: twice as many operations cost more than a quarter of the scores saves.
_SHORT = 128


def attend_in_halves(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array | float, options: Options) -> jax.Array:
    """Attention in two halves of the queries: the first half does not need the second half's keys."""
    half, s = q.shape[2] // 2, options.segments
    how: dict[str, Any] = {
        name: getattr(options, name) for name in ("upcast", "drop", "window", "cap", "slopes", "sinks")
    }
    if options.first_query is not None or q.shape[2] <= _SHORT:
        both = None if s is None else (options.of_queries(s, q.shape[2]), s)
        first = 0 if options.first_query is None else options.first_query
        return checkpoint_name(attend(q, k, v, scale, first, segments=both, **how), SAVED_ATTENTION)
    early, late = (None, None) if s is None else ((s[:, :half], s[:, :half]), (s[:, half:], s))
    first = attend(q[:, :, :half], k[:, :, :half], v[:, :, :half], scale, 0, segments=early, **how)
    second = attend(q[:, :, half:], k, v, scale, half, segments=late, **how)
    return checkpoint_name(jnp.concatenate([first, second], axis=2), SAVED_ATTENTION)


KERNEL = Kernel(name="xla", platform=None, features=all_but(), call=attend_in_halves, is_split=True)
