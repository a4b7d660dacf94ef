"""From hidden states to logits."""

import jax
import jax.numpy as jnp


def logits_of(hidden_BSD: jax.Array, head_VD: jax.Array, vocab_size: int) -> jax.Array:
    """Float32 logits [B, S, vocab_size]; the head's rows from `vocab_size` on are padding."""
    return jnp.einsum("BSD,VD->BSV", hidden_BSD, head_VD)[..., :vocab_size].astype(jnp.float32)
