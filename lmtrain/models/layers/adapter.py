"""The low-rank path of a linear layer (Hu et al. 2021, LoRA): x -> x A^T B^T, added to the layer's output."""

import jax
import jax.numpy as jnp

# The variable collection of adapters, next to `params`: `lora_a` [r, in], `lora_b` [out, r] and, with dropout, its
# rate `lora_rate`, of each adapted layer.
LORA = "lora"
RATE = "lora_rate"


def low_rank(
    x_TI: jax.Array, a_RI: jax.Array, b_OR: jax.Array, key: jax.Array | None, rate: jax.Array | None
) -> jax.Array:
    """The adapter's output [..., out]. With a `key`, dropout at `rate` on x."""
    if key is not None and rate is not None:
        kept = jax.random.bernoulli(key, 1 - rate, x_TI.shape)
        x_TI = jnp.where(kept, x_TI / (1 - rate).astype(x_TI.dtype), 0)
    return (x_TI @ a_RI.T) @ b_OR.T
