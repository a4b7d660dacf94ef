"""The gated delta rule of sequences that are split over devices.

What a device's positions do to the state is linear: S_out = M S_in + N. A pass over its chunks gives both, with values
that are extended by zeros and the state [0 | 1]; devices gather the M and N of all, compute the state that reaches
their own positions, and the rule from there. Where a document begins on a device, M is 0. The convolution gets the last
inputs of the device before. Bytes do not depend on the length: those of N - 1 states and of three positions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.gated_delta.rule import gated_delta_rule
from lmtrain.sharding.local import dividing, num_parts, per_device, split_over

# (raw, kernels, positions in documents, inputs before them) -> q, k, v, of one device's arrays
OfPart = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, ...]]


def positions_over(length: int, taps: int) -> tuple[str, ...]:
    """The mesh axes that split sequences of this length; none if these do not divide, or leave too few positions."""
    names = split_over("act_seq")
    parts = num_parts(names)
    return names if length % parts == 0 and length // parts >= taps - 1 else ()


def over_devices(names: tuple[str, ...], of_part: OfPart, arrays: tuple[Any, ...]) -> jax.Array:
    """The outputs [B, T, H, E] of the rule. `arrays`: inputs of the convolutions, their kernels, gates, strengths,
    positions in documents and their first tokens, as in `layer.py`."""
    raw, _, _, beta, *_ = arrays
    rows, heads = dividing("act_batch", len(beta)), dividing("act_heads", raw[1].shape[2])
    tokens, by_head = PartitionSpec(rows, names, heads), PartitionSpec(None, heads)
    positions, parts = PartitionSpec(rows, names), num_parts(names)

    def local(raw: Any, kernels: Any, g: Any, beta: Any, within: Any, starts: Any) -> jax.Array:
        taps, joint = len(kernels[0]), jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in raw], axis=-1)
        neighbours = [(number, number + 1) for number in range(parts - 1)]
        before = jax.lax.ppermute(joint[:, joint.shape[1] - taps + 1 :], names, neighbours)
        q, k, v = of_part(raw, kernels, within, before)
        values, width = v.shape[3], k.shape[3]
        wider = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width)))
        unit = jnp.broadcast_to(jnp.eye(width, values + width, values), (*beta.shape[::2], width, values + width))
        _, change = gated_delta_rule(q, k, wider, g, beta, starts, unit)
        changes = jax.lax.all_gather(change, names)
        own, state = jax.lax.axis_index(names), jnp.zeros((*beta.shape[::2], width, values), jnp.float32)
        for number in range(parts - 1):
            added, factor = changes[number, ..., :values], changes[number, ..., values:]
            moved = jnp.matmul(factor, state, precision=jax.lax.Precision.HIGHEST) + added
            state = jnp.where(number < own, moved, state)
        return gated_delta_rule(q, k, v, g, beta, starts, state)[0]

    specs = (tokens,) * 3, (by_head,) * 3, tokens, tokens, positions, positions
    result: jax.Array = per_device(local, specs, tokens)(*arrays)
    return result
