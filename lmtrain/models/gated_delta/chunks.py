"""What a layer of Gated DeltaNet computes between its projections, by operations of XLA: on devices without a kernel,
and for generation. Arrays of raw inputs have the columns of all heads.

    B batch  T positions  H heads  C width of keys  E width of values  W taps  D columns
"""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.gated_delta.rule import gated_delta_rule
from lmtrain.models.layers.mlp import rms_norm


def inputs(
    raw: tuple[Any, ...], taps: tuple[Any, ...], within_BT: jax.Array, before: Any, epsilon: float
) -> tuple[jax.Array, ...]:
    """Queries and keys of length 1, queries scaled, and values [B, T, heads, width], from those before the convolution.

    `taps` [W, heads, width] are the kernels of the convolutions, `within` positions in documents, `before`
    [B, W - 1, D] the inputs before the first, None: zeros.
    """
    befores = (None, None, None) if before is None else before
    mixed = []
    for x, kernel, earlier in zip(raw, taps, befores, strict=True):
        out = causal_convolution(x, kernel.reshape(len(kernel), -1), within_BT, earlier)
        mixed.append(out.reshape(*x.shape[:2], *kernel.shape[1:]))
    q, k, v = mixed

    def unit(x: jax.Array, scale: float = 1.0) -> jax.Array:
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + epsilon) * scale
        return (wide * factor).astype(x.dtype)

    return unit(q, q.shape[3] ** -0.5), unit(k), v


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


def state_change(k: Any, v: Any, g_BTH: Any, beta_BTH: Any, starts_BT: Any, state_BHCE: jax.Array) -> jax.Array:
    """The state after the last position, float32 [B, H, C, E]."""
    return gated_delta_rule(k, k, v, g_BTH, beta_BTH, starts_BT, state_BHCE)[1]


def outputs(
    mixed: tuple[jax.Array, ...], z: jax.Array, g_BTH: Any, beta_BTH: Any, starts_BT: Any, state: jax.Array | None,
    scale_E: jax.Array, epsilon: float,
) -> jax.Array:  # fmt: skip
    """The outputs of the rule with their norm and its gate, [B, T, H E]. `mixed` is from `inputs`, `z` [B, T, H E]."""
    q, k, v = mixed
    core, _ = gated_delta_rule(q, k, v, g_BTH, beta_BTH, starts_BT, state)
    return gated(core, z, scale_E, epsilon)


def gated(core_BTHE: jax.Array, z: jax.Array, scale_E: jax.Array, epsilon: float) -> jax.Array:
    """norm(core) * silu(z), [B, T, H E]."""
    normal = rms_norm(core_BTHE, scale_E, epsilon).astype(jnp.float32).reshape(z.shape)
    return (normal * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
