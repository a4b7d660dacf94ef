"""Next-token cross entropy without the logits of the whole batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Logits held at once: large enough for full-speed products, small against the rest of the step's memory.
_LOGITS_PER_CHUNK = 2**22


def next_token_targets(tokens_BS: jax.Array) -> jax.Array:
    """The token after each position; the last position's target is arbitrary and masked by every loss mask."""
    return jnp.roll(tokens_BS, -1, axis=1)


def summed_cross_entropy(
    hidden_BSD: jax.Array, head_VD: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array
) -> jax.Array:
    """sum over masked-in positions of -log softmax(hidden @ head.T)[target], float32 scalar.

    The head's products run in the inputs' precision; log-softmax and the sum in float32. Positions are taken in chunks
    along the sequence, so that a chunk spans all devices of a sharded batch. When gradients are wanted, each chunk's
    are computed right after its loss, from the logits that are there anyway: three products with the head, as for
    whole logits, where recomputing chunks in the backward pass takes four.
    """
    batch, length = targets_BS.shape
    chunks = _num_chunks(batch * length * head_VD.shape[0], length)
    return _summed(hidden_BSD, head_VD, targets_BS, mask_BS, chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, chunks: int) -> jax.Array:
    def one(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        loss, _ = _chunk(hidden, head, targets, mask, chunks, index)
        return total + loss, None

    return jax.lax.scan(one, jnp.float32(0), jnp.arange(chunks))[0]


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, chunks: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def one(sums: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        total, d_head = sums
        loss, (rows, d_logits) = _chunk(hidden, head, targets, mask, chunks, index)
        d_rows = jnp.einsum("TV,VD->TD", d_logits, head)
        d_head = d_head + jnp.einsum("TV,TD->VD", d_logits, rows, preferred_element_type=jnp.float32)
        return (total + loss, d_head), d_rows.reshape(hidden.shape[0], -1, hidden.shape[2])

    zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), parts_CBSD = jax.lax.scan(one, zeros, jnp.arange(chunks))
    d_hidden = jnp.moveaxis(parts_CBSD, 0, 1).reshape(hidden.shape)
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(chunks: int, gradients: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_head = gradients
    return (upstream * d_hidden).astype(d_hidden.dtype), (upstream * d_head).astype(d_head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _chunk(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, chunks: int, index: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Summed loss of chunk `index`, its rows of `hidden` [T, D], and the gradient of the loss by its logits [T, V].

    d loss / d logits = softmax(logits) - one_hot(target), and 0 where masked out.
    """
    length = targets.shape[1] // chunks

    def rows_of(array: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(array, index * length, length, axis=1)
        return part.reshape(-1, *array.shape[2:])

    rows, target, kept = rows_of(hidden), rows_of(targets), rows_of(mask)
    logits_TV = jnp.einsum("TD,VD->TV", rows, head).astype(jnp.float32)
    log_sum = jax.nn.logsumexp(logits_TV, axis=-1)
    chosen = jnp.take_along_axis(logits_TV, target[:, None], axis=-1)[:, 0]
    loss = jnp.where(kept, log_sum - chosen, 0.0).sum()
    is_target = jnp.arange(head.shape[0]) == target[:, None]
    d_logits = jnp.exp(logits_TV - log_sum[:, None]) - is_target
    return loss, (rows, jnp.where(kept[:, None], d_logits, 0.0).astype(hidden.dtype))


def _num_chunks(logits: int, length: int) -> int:
    """The fewest chunks that divide the sequence and keep each chunk's logits within bounds."""
    wanted = min(-(-logits // _LOGITS_PER_CHUNK), length)
    return next(n for n in range(wanted, length + 1) if length % n == 0)
