"""Attention on NVIDIA GPUs by our own kernels; memory grows with the length. `attend.py` is the entry point."""

import jax

from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.kernel import Kernel, all_but, missing_in_jax


def triton(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of a sequence to itself, in 16 bits. -> [B, H, S, D]"""
    from lmtrain.models.attention.triton.attend import attend  # imports Pallas, which is slow

    return attend(q_BHSC, k_BKSC, v_BKSC, scale, options)


def triton_latent(
    q_BHSC: jax.Array, kv_BHSE: jax.Array, shared_B1SR: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """The attention of latents; see `Kernel`. -> [B, H, S, D]"""
    from lmtrain.models.attention.triton.attend import attend_latent

    return attend_latent(q_BHSC, kv_BHSE, shared_B1SR, scale, options)


def _unavailable(_: str) -> str:
    """JAX 0.11 and later announce the removal of this backend."""
    return missing_in_jax("jax.experimental.pallas.triton", "the Triton backend of Pallas")


# Seven products backward: two of the five are computed twice, once for keys and values and once for queries.
KERNEL = Kernel(
    name="triton",
    platform="gpu",
    features=all_but("dropout", "float32", "very_wide_heads", "odd_values", "second_derivatives"),
    call=triton,
    latent=triton_latent,
    flops=(4, 3),
    unavailable=_unavailable,
)
