"""The choice between kernels and XLA's operations for what a layer computes between its projections."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.attention.kernel import Choice
from lmtrain.models.gated_delta.config import CHUNK, SCOPE
from lmtrain.sharding.local import device_kind, dividing, per_device, platform, split_over


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
