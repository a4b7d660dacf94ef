"""Next-token cross entropy without the logits of the whole batch."""

import jax
import jax.numpy as jnp

# Logits held at once: large enough for full-speed products, small against the rest of the step's memory.
_LOGITS_PER_CHUNK = 2**21


def next_token_targets(tokens_BS: jax.Array) -> jax.Array:
    """The token after each position; the last position's target is arbitrary and masked by every loss mask."""
    return jnp.roll(tokens_BS, -1, axis=1)


def summed_cross_entropy(
    hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array
) -> jax.Array:
    """sum over masked-in positions of -log softmax(hidden @ head.T)[target], float32 scalar.

    The head's product runs in the inputs' precision; log-softmax and the sum in float32. Chunks of positions are
    computed one after the other, and recomputed in the backward pass, so that no more than a chunk's logits exist.
    """
    flat_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
    targets, mask = targets_BS.reshape(-1), mask_BS.reshape(-1)
    chunks = _num_chunks(flat_TD.shape[0], head_VD.shape[0])
    if chunks == 1:
        return _chunk_loss(flat_TD, head_VD, targets, mask)

    # chunk c takes positions c, c + chunks, ...: every chunk then spans all devices of a sharded batch
    parts = tuple(array.reshape(-1, chunks, *array.shape[1:]) for array in (flat_TD, targets, mask))

    @jax.checkpoint
    def one(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        hidden, target, kept = (jax.lax.dynamic_index_in_dim(part, index, 1, keepdims=False) for part in parts)
        return total + _chunk_loss(hidden, head_VD, target, kept), None

    total, _ = jax.lax.scan(one, jnp.float32(0), jnp.arange(chunks))
    return total


def _chunk_loss(hidden_TD: jax.Array, head_VD: jax.Array, targets_T: jax.Array, mask_T: jax.Array) -> jax.Array:
    logits_TV = jnp.einsum("TD,VD->TV", hidden_TD, head_VD).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits_TV, axis=-1) - chosen
    return jnp.where(mask_T, losses, 0.0).sum()


def _num_chunks(tokens: int, vocab: int) -> int:
    """The fewest chunks that divide the tokens and keep each chunk's logits within bounds."""
    wanted = -(-tokens * vocab // _LOGITS_PER_CHUNK)
    return next(n for n in range(wanted, tokens + 1) if tokens % n == 0) if wanted < tokens else tokens
