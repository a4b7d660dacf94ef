"""Next-token cross entropy without the logits of the whole batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.sharding.local import per_device, scatter_sum, split_over, sum_over
from lmtrain.train.step.logits import Chunks


class _Form(NamedTuple):
    """Static: chunks, the weight of z-loss, and the mesh axes that the head is split over as it is stored."""

    chunks: Chunks
    z_loss_weight: float
    stored_vocab: tuple[str, ...]
    stored_embed: tuple[str, ...]


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

    The head's products run in the inputs' precision; log-softmax and all sums in float32. Each device takes its own
    rows in chunks. When gradients are wanted, each chunk's are computed right after its loss, from the logits that are
    there anyway: three products with the head, as for whole logits, where recomputing chunks in the backward pass
    takes four. Inside the loop nothing but a few floats per row goes between devices, and that only if the vocabulary
    is split: the head is gathered before it, and its gradient is summed over devices after it.
    """
    form = _Form(Chunks.plan(hidden_BSD, head_VD, vocab_size), z_loss_weight, split_over("vocab"), split_over("embed"))
    return _summed(hidden_BSD, head_VD, targets_BS, mask_BS, form)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, form: _Form) -> jax.Array:
    chunks = form.chunks

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        def one(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            rows, target, kept = part
            logits = chunks.logits(rows, head)
            return total + _loss(form, _log_sum(form, logits), _chosen(form, logits, head, target), kept), None

        parts = tuple(map(chunks.cut, (hidden, targets, mask)))
        return sum_over(chunks.rows, jax.lax.scan(one, jnp.float32(0), parts)[0])

    rows = chunks.of_rows
    total: jax.Array = per_device(local, (rows, chunks.of_head, rows, rows), PartitionSpec())(
        hidden, head, targets, mask
    )
    return total


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, form: _Form
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    chunks = form.chunks
    stored_vocab, stored_embed = (
        tuple(name for name in stored if name in chunks.rows) for stored in (form.stored_vocab, form.stored_embed)
    )
    elsewhere = tuple(name for name in chunks.rows if name not in stored_vocab + stored_embed)
    # the sums over parts of the vocabulary nearly cancel: in bfloat16, gradients would be half as exact
    partial_sum = jnp.float32 if chunks.vocab else hidden.dtype

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
        def one(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            total, d_head = sums
            rows, target, kept = part
            logits = chunks.logits(rows, head)
            log_sum = _log_sum(form, logits)
            d_logits = _d_logits(form, logits, log_sum, head, target, kept).astype(rows.dtype)
            d_head += jnp.einsum("TV,TD->VD", d_logits, rows, preferred_element_type=jnp.float32)
            d_rows = jnp.einsum("TV,VD->TD", d_logits, head, preferred_element_type=partial_sum)
            return (total + _loss(form, log_sum, _chosen(form, logits, head, target), kept), d_head), d_rows

        zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
        (total, d_head), d_rows = jax.lax.scan(one, zeros, tuple(map(chunks.cut, (hidden, targets, mask))))
        d_head = scatter_sum(scatter_sum(d_head, stored_vocab, 0), stored_embed, 1)
        d_hidden = scatter_sum(chunks.join(d_rows, hidden), chunks.gathered, 1)
        missing = tuple(name for name in chunks.vocab if name not in chunks.gathered)
        d_hidden = sum_over(missing, d_hidden).astype(hidden.dtype)
        return sum_over(chunks.rows, total), d_hidden, sum_over(elsewhere, d_head)

    rows = chunks.of_rows
    gradients = (
        PartitionSpec(chunks.batch, chunks.positions),
        PartitionSpec(chunks.vocab + stored_vocab, stored_embed),
    )
    total, d_hidden, d_head = per_device(local, (rows, chunks.of_head, rows, rows), (PartitionSpec(), *gradients))(
        hidden, head, targets, mask
    )
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(form: _Form, gradients: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_head = gradients
    return (upstream * d_hidden).astype(d_hidden.dtype), (upstream * d_head).astype(d_head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _log_sum(form: _Form, logits_TV: jax.Array) -> jax.Array:
    """log sum exp(logits) over the whole vocabulary, [T]."""
    vocab = form.chunks.vocab
    highest = jax.lax.stop_gradient(logits_TV.max(-1))
    if vocab:
        highest = jax.lax.pmax(highest, vocab)
    return highest + jnp.log(sum_over(vocab, jnp.exp(logits_TV - highest[:, None]).sum(-1)))


def _chosen(form: _Form, logits_TV: jax.Array, head: jax.Array, target_T: jax.Array) -> jax.Array:
    """The logits of the targets, [T], wherever in the vocabulary they are."""
    column = target_T - form.chunks.first_token(head)
    inside = (column >= 0) & (column < len(head))
    chosen = jnp.take_along_axis(logits_TV, jnp.clip(column, 0, len(head) - 1)[:, None], axis=-1)[:, 0]
    return sum_over(form.chunks.vocab, jnp.where(inside, chosen, 0.0))


def _loss(form: _Form, log_sum_T: jax.Array, chosen_T: jax.Array, kept_T: jax.Array) -> jax.Array:
    loss = log_sum_T - chosen_T
    if form.z_loss_weight:
        loss = loss + form.z_loss_weight * log_sum_T**2
    return jnp.where(kept_T, loss, 0.0).sum()


def _d_logits(
    form: _Form, logits_TV: jax.Array, log_sum_T: jax.Array, head: jax.Array, target_T: jax.Array, kept_T: jax.Array
) -> jax.Array:
    """softmax(logits) (1 + 2 z_loss_weight log_sum) - one_hot(target), and 0 where masked out."""
    is_target = form.chunks.first_token(head) + jnp.arange(len(head)) == target_T[:, None]
    weight = jnp.where(kept_T, 1 + 2 * form.z_loss_weight * log_sum_T, 0.0)
    return jnp.exp(logits_TV - log_sum_T[:, None]) * weight[:, None] - (is_target & kept_T[:, None])
