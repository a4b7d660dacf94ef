"""Next-token cross entropy without the logits of the whole batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmtrain.sharding.placement import constrain

# Logits held at once: large enough for full-speed products, small against the rest of the step's memory.
_LOGITS_PER_CHUNK = 2**22

# With fewer rows, a product with the head is bound by reading the head: then the vocabulary is divided too.
_FEWEST_ROWS = 64
_MOST_BLOCKS = 64

# Far below any logit, and finite: its exponential is 0, and so is its gradient.
_NO_TOKEN = -1e30


class _Form(NamedTuple):
    """Static choices: parts of the sequence and of the vocabulary, how many columns are tokens, weight of z-loss."""

    chunks: int
    blocks: int
    vocab_size: int
    z_loss_weight: float


def next_token_targets(tokens_BS: jax.Array) -> jax.Array:
    """The token after each position; the last position's target is arbitrary and masked by every loss mask."""
    return jnp.roll(tokens_BS, -1, axis=1)


def summed_cross_entropy(
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array,
    vocab_size: int | None = None,
    z_loss_weight: float = 0.0,
) -> jax.Array:
    """sum over masked-in positions of -log softmax(hidden @ head.T)[target] + z_loss_weight * log_sum^2, float32.

    log_sum is the logarithm of the sum of the exponentials of the logits (Chowdhery et al. 2022, PaLM, section 5). Rows
    of the head from `vocab_size` on are padding and take no part.

    The head's products run in the inputs' precision; log-softmax and the sum in float32. Positions are taken in chunks
    along the sequence, so that a chunk spans all devices of a sharded batch. When gradients are wanted, each chunk's
    are computed right after its loss, from the logits that are there anyway: three products with the head, as for
    whole logits, where recomputing chunks in the backward pass takes four. Of a very large vocabulary only a block is
    held at a time, which does take four.
    """
    batch, length = targets_BS.shape
    rows = head_VD.shape[0]
    chunks, blocks = _plan(batch * length, length, rows)
    form = _Form(chunks, blocks, vocab_size or rows, z_loss_weight)
    return _summed(hidden_BSD, head_VD, targets_BS, mask_BS, form)


def sample_targets(hidden_BSD: jax.Array, head_VD: jax.Array, key: jax.Array, vocab_size: int) -> jax.Array:
    """For each position a token drawn from softmax(hidden @ head.T), int32 [B, S].

    In the same chunks of the sequence as the loss; the vocabulary is held whole.
    """
    batch, length = hidden_BSD.shape[:2]
    chunks, _ = _plan(batch * length, length, head_VD.shape[0])
    form = _Form(chunks, 1, vocab_size, 0.0)

    def one(_: None, index: jax.Array) -> tuple[None, jax.Array]:
        (rows,) = _take(form, index, hidden_BSD)
        drawn = jax.random.categorical(jax.random.fold_in(key, index), _logits(form, rows, head_VD, 0))
        return None, drawn.reshape(batch, -1)

    _, parts_CBS = jax.lax.scan(one, None, jnp.arange(chunks))
    return jnp.moveaxis(parts_CBS, 0, 1).reshape(batch, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, form: _Form) -> jax.Array:
    def one(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        rows, target, kept = _take(form, index, hidden, targets, mask)
        return total + _loss(form, *_log_sums(form, rows, head, target)[:2], kept), None

    return jax.lax.scan(one, jnp.float32(0), jnp.arange(form.chunks))[0]


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, form: _Form
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def one(sums: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        total, d_head = sums
        rows, target, kept = _take(form, index, hidden, targets, mask)
        log_sum, chosen, logits = _log_sums(form, rows, head, target)
        weight = jnp.where(kept, 1 + 2 * form.z_loss_weight * log_sum, 0.0)
        d_rows, d_head = _gradients(form, rows, head, target, kept, weight, log_sum, logits, d_head)
        return (total + _loss(form, log_sum, chosen, kept), d_head), d_rows.reshape(
            hidden.shape[0], -1, hidden.shape[2]
        )

    zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), parts_CBSD = jax.lax.scan(one, zeros, jnp.arange(form.chunks))
    d_hidden = jnp.moveaxis(parts_CBSD, 0, 1).reshape(hidden.shape)
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(form: _Form, gradients: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_head = gradients
    return (upstream * d_hidden).astype(d_hidden.dtype), (upstream * d_head).astype(d_head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _take(form: _Form, index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Chunk `index` of [B, S, ...] arrays, as rows [T, ...]."""
    length = arrays[0].shape[1] // form.chunks
    parts = [jax.lax.dynamic_slice_in_dim(array, index * length, length, axis=1) for array in arrays]
    return [part.reshape(-1, *part.shape[2:]) for part in parts]


def _loss(form: _Form, log_sum_T: jax.Array, chosen_T: jax.Array, kept_T: jax.Array) -> jax.Array:
    loss = log_sum_T - chosen_T
    if form.z_loss_weight:
        loss = loss + form.z_loss_weight * log_sum_T**2
    return jnp.where(kept_T, loss, 0.0).sum()


def _log_sums(
    form: _Form, rows_TD: jax.Array, head: jax.Array, target_T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """log sum exp(logits) and the target's logit, [T] each; and the logits [T, V] if they are held whole."""
    if form.blocks == 1:
        logits_TV = _logits(form, rows_TD, head, 0)
        return jax.nn.logsumexp(logits_TV, axis=-1), _pick(logits_TV, target_T), logits_TV

    def one(sums: Any, block: jax.Array) -> tuple[Any, None]:
        log_sum, chosen = sums
        part, first = _block(form, head, block)
        logits = _logits(form, rows_TD, part, first)
        local = target_T - first
        inside = (local >= 0) & (local < part.shape[0])
        chosen = jnp.where(inside, _pick(logits, jnp.clip(local, 0, part.shape[0] - 1)), chosen)
        return (jnp.logaddexp(log_sum, jax.nn.logsumexp(logits, axis=-1)), chosen), None

    begin = (jnp.full(target_T.shape, _NO_TOKEN, jnp.float32), jnp.zeros(target_T.shape, jnp.float32))
    (log_sum, chosen), _ = jax.lax.scan(one, begin, jnp.arange(form.blocks))
    return log_sum, chosen, None


def _gradients(
    form: _Form,
    rows_TD: jax.Array,
    head: jax.Array,
    target_T: jax.Array,
    kept_T: jax.Array,
    weight_T: jax.Array,
    log_sum_T: jax.Array,
    logits_TV: jax.Array | None,
    d_head: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The gradient by the rows, and `d_head` with this chunk's share added.

    d loss / d logits = softmax(logits) (1 + 2 z_loss_weight log_sum) - one_hot(target), and 0 where masked out.
    """

    def of_logits(logits: jax.Array, first: jax.Array | int) -> jax.Array:
        is_target = first + jnp.arange(logits.shape[1]) == target_T[:, None]
        probabilities = jnp.exp(logits - log_sum_T[:, None])
        return (probabilities * weight_T[:, None] - (is_target & kept_T[:, None])).astype(rows_TD.dtype)

    def products(d_logits: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_part = jnp.einsum("TV,TD->VD", d_logits, rows_TD, preferred_element_type=jnp.float32)
        return jnp.einsum("TV,VD->TD", d_logits, part), d_part

    if logits_TV is not None:
        d_rows, d_part = products(of_logits(logits_TV, 0), head)
        return d_rows, d_head + d_part

    def one(sums: Any, block: jax.Array) -> tuple[Any, None]:
        d_rows, d_head = sums
        part, first = _block(form, head, block)
        more, d_part = products(of_logits(_logits(form, rows_TD, part, first), first), part)
        before = jax.lax.dynamic_slice_in_dim(d_head, first, part.shape[0])
        d_head = jax.lax.dynamic_update_slice_in_dim(d_head, before + d_part, first, axis=0)
        return (d_rows + more.astype(jnp.float32), d_head), None

    begin = (jnp.zeros(rows_TD.shape, jnp.float32), d_head)
    (d_rows, d_head), _ = jax.lax.scan(one, begin, jnp.arange(form.blocks))
    return d_rows.astype(rows_TD.dtype), d_head


def _block(form: _Form, head: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of the head that make a block of the vocabulary, and the first one's number."""
    size = head.shape[0] // form.blocks
    return jax.lax.dynamic_slice_in_dim(head, block * size, size), block * size


def _logits(form: _Form, rows_TD: jax.Array, part_VD: jax.Array, first: jax.Array | int) -> jax.Array:
    """Float32 logits of tokens `first, first + 1, ...`, with none for padding."""
    logits = constrain(jnp.einsum("TD,VD->TV", rows_TD, part_VD), "act_batch", "act_vocab").astype(jnp.float32)
    if form.vocab_size == part_VD.shape[0] * form.blocks:
        return logits  # nothing is padding
    return jnp.where(first + jnp.arange(part_VD.shape[0]) < form.vocab_size, logits, _NO_TOKEN)


def _pick(logits_TV: jax.Array, column_T: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_TV, column_T[:, None], axis=-1)[:, 0]


def logits_held(batch: int, length: int, rows: int) -> int:
    """Logits that are in memory at once, for `batch` sequences and a head of so many rows."""
    chunks, blocks = _plan(batch * length, length, rows)
    return batch * length // chunks * (rows // blocks)


def _plan(rows: int, length: int, vocab: int) -> tuple[int, int]:
    """Into how many chunks of the sequence and blocks of the vocabulary: the fewest that keep logits within bounds."""
    fewest = min(rows, _FEWEST_ROWS)
    divisors = (n for n in range(1, _MOST_BLOCKS + 1) if vocab % n == 0)
    blocks = next((n for n in divisors if fewest * (vocab // n) <= _LOGITS_PER_CHUNK), 1)
    wanted = min(-(-rows * (vocab // blocks) // _LOGITS_PER_CHUNK), length)
    return next(n for n in range(wanted, length + 1) if length % n == 0), blocks
