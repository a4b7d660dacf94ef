"""The fused kernel of NVIDIA's cuDNN with packed documents: as `cudnn`, on server GPUs from Hopper on.

JAX has no public name for it. It stands in for `triton` where JAX no longer has that one's backend.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.compiled.executions import RARELY
from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.blockwise import blockwise
from lmtrain.models.attention.kernel import Kernel, is_hopper_or_later, missing_in_jax
from lmtrain.sharding.local import device_kind

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"

# The kernel's memory grows with the greatest number of documents in a sequence. Those with more take `blockwise`.
MOST_DOCUMENTS = 64


def cudnn_packed(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of a sequence to itself; equal neighbours in `segments` are one document. -> [B, H, S, C]"""
    batch, length = q_BHSC.shape[0], q_BHSC.shape[2]
    segments = jnp.zeros((batch, length), jnp.int32) if options.segments is None else options.segments
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts, lengths = documents(begins)

    fused: Any
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if jax.default_backend() != "gpu":  # a plan for other machines: JAX would ask this one's GPU
        is_able = is_hopper_or_later(device_kind())
        fused.check_compute_capability = lambda capability: is_able

    def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # before JAX 0.12 the offsets of keys are those of queries, wrong with fewer heads
        k, v = (jnp.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        q, k, v = (part.transpose(0, 2, 1, 3) for part in ((q * scale).astype(q.dtype), k, v))
        mixed: jax.Array = fused.dot_product_attention(
            *(q, k, v, None, None, lengths, lengths, starts, starts),
            mask_type=fused.MaskType.PADDING_CAUSAL,
            sliding_window_length=options.window,
        )
        return mixed.transpose(0, 2, 1, 3)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with jax.named_scope(RARELY):
            return blockwise(q, k, v, scale, options)

    fits = begins.sum(axis=1).max() <= MOST_DOCUMENTS
    return jax.lax.cond(fits, packed, in_blocks, q_BHSC, k_BKSC, v_BKSC)


def documents(begins_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first position of each document, [B, N + 1], and its length, [B, N], int32; -1 after the last one."""
    length = begins_BS.shape[1]
    at = jnp.sort(jnp.where(begins_BS, jnp.arange(length, dtype=jnp.int32), length), axis=1)
    at = jnp.pad(at, ((0, 0), (0, MOST_DOCUMENTS + 1)), constant_values=length)[:, : MOST_DOCUMENTS + 1]
    exists = at < length
    return jnp.where(exists, at, -1), jnp.where(exists[:, :-1], at[:, 1:] - at[:, :-1], -1)


def _unavailable(device_kind: str) -> str:
    if not is_hopper_or_later(device_kind):
        return f"requires a server GPU from Hopper on (H100, B200, ...), got {device_kind}"
    return missing_in_jax(_MODULE, "the packed layout of cuDNN")


KERNEL = Kernel(
    name="cudnn_packed",
    platform="gpu",
    features=frozenset({"window", "segments"}),
    call=cudnn_packed,
    flops=(3, 2),
    unavailable=_unavailable,
)
