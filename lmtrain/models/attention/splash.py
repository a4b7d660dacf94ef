"""Attention by JAX's kernel for TPUs ("splash": flash attention over a sparse mask), on every device of the mesh.

The compiler does not split kernels, so each device runs the kernel on its own sequences and heads. Memory grows with
the length. On devices other than TPUs the kernel is interpreted: slow, and only for tests.
"""

import math

import jax
import jax.numpy as jnp

from lmtrain.models.attention.kernel import Kernel
from lmtrain.models.attention.options import Options
from lmtrain.models.layers.remat import SAVED_ATTENTION
from lmtrain.sharding.local import platform

DEFAULT_BLOCK_SIZE = 512


def splash(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of a sequence to itself, whose length is a multiple of 128. -> [B, H, S, C]"""
    # slow to import
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, window = q_BHSC.shape[2], options.window
    is_tpu = platform() == "tpu"
    # blocks of the kernel are multiples of 128
    block = math.gcd(-(-(options.block_size or DEFAULT_BLOCK_SIZE) // 128) * 128, length)

    mask: masks.Mask = masks.CausalMask((length, length))
    if window is not None:
        mask = masks.LocalMask((length, length), (window - 1, 0), 0)
    blocks = kernels.BlockSizes(block, block, block, block, block, block, block, block)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * q_BHSC.shape[1]),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED_ATTENTION,
        interpret=not is_tpu,
    )
    segments = jnp.zeros((len(q_BHSC), length), jnp.int32) if options.segments is None else options.segments

    def of_sequence(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        mixed: jax.Array = kernel(q, k, v, segment_ids=kernels.SegmentIds(s, s))
        return mixed

    return jax.vmap(of_sequence)((q_BHSC * scale).astype(q_BHSC.dtype), k_BKSC, v_BKSC, segments)


# Seven products backward: two of the five are computed twice, once for keys and values and once for queries.
KERNEL = Kernel(
    "splash",
    "tpu",
    frozenset({"window", "segments", "float32", "wide_heads", "very_wide_heads", "odd_heads"}),
    splash,
    uses_block_size=True,
    flops=(1.0, 3.5),
)
