"""The short causal convolution before the gated delta rule: each channel alone, within its document."""

import jax
import jax.numpy as jnp


def causal_convolution(
    x_BTD: jax.Array, kernel_WD: jax.Array, positions_BT: jax.Array, before_BWD: jax.Array | None = None
) -> jax.Array:
    """silu(sum over w of kernel[W - 1 - w] * x at w positions before), [B, T, D], in the dtype of `x`.

    `positions` are those within documents: earlier documents are not seen. `before` [B, W - 1, D] are the inputs before
    the first; None: zeros.
    """
    width, length = kernel_WD.shape[0], x_BTD.shape[1]
    if before_BWD is None:
        before_BWD = jnp.zeros((x_BTD.shape[0], width - 1, x_BTD.shape[2]), x_BTD.dtype)
    padded = jnp.concatenate([before_BWD, x_BTD], axis=1)
    total = jnp.zeros(x_BTD.shape, jnp.float32)
    for back in range(width):
        first = width - 1 - back
        seen = jnp.where((positions_BT >= back)[..., None], padded[:, first : first + length], 0)
        total += seen.astype(jnp.float32) * kernel_WD[first].astype(jnp.float32)
    return jax.nn.silu(total).astype(x_BTD.dtype)
