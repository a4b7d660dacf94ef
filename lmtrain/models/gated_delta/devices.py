"""What each device computes between the projections of a layer: by a kernel or by XLA's operations, and its part of
sequences that are split over devices.

What a device's positions do to the state is linear: S_out = M S_in + N. A pass over its chunks gives both, with values
that are extended by zeros and the state [0 | 1]; devices gather the M and N of all, compute the state that reaches
their own positions, and the rule from there. Where a document begins on a device, M is 0. The convolution gets the last
inputs of the device before. Bytes do not depend on the length: those of N - 1 states and of three positions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.attention.kernel import Choice
from lmtrain.models.gated_delta.config import CHUNK, SCOPE
from lmtrain.models.gated_delta.rule import gated_delta_rule
from lmtrain.sharding.local import device_kind, dividing, num_parts, per_device, platform, split_over


def choose_delta(platform: str, device_kind: str, is_split: bool = False) -> Choice:
    """The implementation on a platform and a kind of device: `mosaic.py`, or the chunks of `rule.py`, which can be used
    where devices share sequences."""
    if is_split:
        return Choice("chunks", "devices exchange states")
    if platform == "tpu":
        return Choice("mosaic", "fastest on this device")
    return Choice("chunks", "there is no kernel for this device" if platform == "gpu" else "fastest on this device")


def has_kernel() -> bool:
    """Whether the program being traced uses a kernel."""
    return choose_delta(platform(), device_kind(), bool(split_over("act_seq"))).name != "chunks"


def mix(
    raw: tuple[jax.Array, ...],
    taps: tuple[jax.Array, ...],
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    starts_BT: jax.Array | None,
    within_BT: jax.Array,
    scale_E: jax.Array,
    epsilons: tuple[float, float],
) -> jax.Array:
    """Convolutions of projections to q, k [B, T, K C] and v [B, T, H E], the rule, and the norm of its outputs with a
    gate z like v: [B, T, H E]. `raw` are q, k, v and z. Each device computes its sequences and heads.

    `taps` [W, heads, width] are the kernels of the convolutions, `starts` and `within` the first tokens of documents
    and positions in them, `epsilons` those of the norms of outputs, and of queries and keys.
    """
    from lmtrain.models.gated_delta import mosaic  # imports Pallas, which is slow

    if starts_BT is None:
        starts_BT = jnp.zeros(within_BT.shape, bool)
    rows, heads = dividing("act_batch", len(within_BT)), dividing("act_heads", taps[1].shape[1])
    tokens, by_head, of_rows = PartitionSpec(rows, None, heads), PartitionSpec(None, heads), PartitionSpec(rows)
    local = per_device(
        functools.partial(mosaic.mix, epsilons=epsilons, chunk=CHUNK),
        ((tokens,) * 4, (by_head,) * 3, tokens, tokens, of_rows, of_rows, PartitionSpec()),
        tokens,
    )
    with jax.named_scope(SCOPE):
        mixed: jax.Array = local(raw, taps, g_BTH, beta_BTH, starts_BT, within_BT, scale_E)
    return mixed


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
