"""Attention by JAX's kernel for TPUs ("splash": flash attention over a sparse mask), on every device of the mesh.

Kernels are not split by the compiler, so each device is told to run its own on the sequences and heads it has. On
other devices than TPUs the kernel is interpreted: slow, and of use to tests only.
"""

import math

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from lmtrain.models.layers.remat import SAVED_ATTENTION

DEFAULT_BLOCK_SIZE = 512


def splash(
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array,
    scale: jax.Array | float,
    segments_BS: jax.Array | None = None,
    window: int | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """`attend` of a sequence to itself, without dropout, ALiBi or float32 scores. -> [B, H, S, C]

    The length must be a multiple of 128.
    """
    length = q_BHSC.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    is_tpu = _platform() == "tpu"
    # the kernel's own unit is 128
    block = math.gcd(-(-(block_size or DEFAULT_BLOCK_SIZE) // 128) * 128, length)
    if segments_BS is None:
        segments_BS = jax.numpy.zeros((q_BHSC.shape[0], length), np.int32)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        mask: masks.Mask = masks.CausalMask((length, length))
        if window is not None:
            mask = masks.LocalMask((length, length), (window - 1, 0), 0)
        blocks = kernels.BlockSizes(block, block, block, block, block, block, block, block)
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[1]),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED_ATTENTION,
            interpret=not is_tpu,
        )
        return jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=kernels.SegmentIds(s, s)))(q, k, v, segments)

    q_BHSC = (q_BHSC * scale).astype(q_BHSC.dtype)
    if mesh.empty or mesh.size == 1:
        return local(q_BHSC, k_BKSC, v_BKSC, segments_BS)

    def spec(*axes: str | None) -> PartitionSpec:
        return nn.logical_to_mesh_axes(axes) or PartitionSpec()

    query, key = (spec("act_batch", heads, None, None) for heads in ("act_heads", "act_kv_heads"))
    if query != key:
        # a device's query heads would meet the key heads of others: give each query head its own
        k_BKSC, v_BKSC = (jax.numpy.repeat(x, q_BHSC.shape[1] // x.shape[1], axis=1) for x in (k_BKSC, v_BKSC))
        key = query
    placed = jax.shard_map(
        local, mesh=mesh, in_specs=(query, key, key, spec("act_batch", None)), out_specs=query, check_vma=False
    )
    mixed: jax.Array = placed(q_BHSC, k_BKSC, v_BKSC, segments_BS)
    return mixed


def _platform() -> str:
    """Of the devices that the program is for, which may not be those of this machine."""
    mesh = jax.sharding.get_abstract_mesh()
    platform: str = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    return platform
