"""Attention by JAX's kernel for TPUs ("splash": flash attention over a sparse mask), on every device of the mesh.

The compiler does not split kernels, so each device runs the kernel on its own sequences and heads. Memory grows with
the length. On devices other than TPUs the kernel is interpreted: slow, and only for tests.
"""

import jax
import jax.numpy as jnp

from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.blockwise import mean_blocks
from lmtrain.models.attention.kernel import Kernel, all_but, join_keys
from lmtrain.models.layers.remat import SAVED_ATTENTION
from lmtrain.sharding.local import device_kind, platform

# Blocks are multiples of this.
_STEP = 128

# Instructions that a TPU v5e executes in the three kernels for a block of queries and one of keys of these sizes, heads
# of 128, by tools/bench/splash_blocks.py; those of a v6e are in the same proportions. Larger blocks do not fit into its
# on-chip memory.
_INSTRUCTIONS = {256: 2817, 384: 4749, 512: 6135, 640: 9335, 768: 12815, 1024: 20779}
_LARGEST_WIDE = 512  # for heads wider than 128, of 32 bits, or with a cap: larger ones do not fit into a v4


def splash(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of a sequence to itself. -> [B, H, S, C]"""
    # slow to import
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    given, window = q_BHSC.shape[2], options.window
    is_tpu = platform() == "tpu"
    is_wide = q_BHSC.shape[3] > 128 or q_BHSC.dtype == jnp.float32 or options.cap is not None
    block = block_for(given, window, options.block_size, is_wide)
    length = _up(given, block)

    def pad(x: jax.Array, axis: int) -> jax.Array:
        """Padding comes after all queries, so that none sees it."""
        return jnp.pad(x, [(0, length - given if axis == number else 0) for number in range(x.ndim)])

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
        attn_logits_soft_cap=options.cap,
        interpret=not is_tpu,
    )
    segments = jnp.zeros((len(q_BHSC), given), jnp.int32) if options.segments is None else options.segments

    def of_sequence(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        mixed: jax.Array = kernel(q, k, v, segment_ids=kernels.SegmentIds(s, s), sinks=options.sinks)
        return mixed

    q = (q_BHSC * scale).astype(q_BHSC.dtype)
    mixed: jax.Array = jax.vmap(of_sequence)(pad(q, 2), pad(k_BKSC, 2), pad(v_BKSC, 2), pad(segments, 1))
    return mixed[:, :, :given]


def splash_latent(
    q_BHSC: jax.Array, kv_BHSE: jax.Array, shared_B1SR: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """The attention of latents (see `Kernel`), by kernels of our own where they fit. -> [B, H, S, V]"""
    from lmtrain.models.attention import latent_mosaic as own

    length, width, rope = *q_BHSC.shape[2:], shared_B1SR.shape[-1]
    is_v4 = "v4" in device_kind().lower()
    block = block_for(length, options.window, options.block_size, is_v4 or q_BHSC.dtype == jnp.float32)
    fits = own.bytes_on_core(_up(length, block), width, rope) <= own.CORE_BYTES // 2
    if (width - rope) % 128 or is_v4 or not fits:
        return splash(q_BHSC, *join_keys(width, kv_BHSE, shared_B1SR), scale, options)
    return own.attend_latent(q_BHSC, kv_BHSE, shared_B1SR, float(scale), options, block)


def block_for(length: int, window: int | None, wish: int | None, is_wide: bool) -> int:
    """The size of blocks in positions: the wish, rounded up to a multiple of 128, else the one with the fewest
    instructions for all pairs of blocks that are not masked entirely, padding included."""
    whole = _up(length, _STEP)
    if wish is not None:
        return min(_up(wish, _STEP), whole)

    def instructions(block: int) -> float:
        return mean_blocks(length, block, window) * -(-length // block) * _INSTRUCTIONS[block]

    sizes = [block for block in _INSTRUCTIONS if not is_wide or block <= _LARGEST_WIDE]
    return min(min(sizes, key=instructions), whole)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# Two of the five products backward are computed twice, once for keys and values and once for queries.
KERNEL = Kernel(
    name="splash",
    platform="tpu",
    features=all_but("alibi", "part", "dropout", "upcast", "wide_values", "odd_values", "second_derivatives"),
    call=splash,
    latent=splash_latent,
    uses_block_size=True,
    flops=(4, 3),
    latent_flops=(3, 2),
)
