"""Targets sampled from the model's own prediction, for Sophia-G."""

import functools

import jax
import jax.numpy as jnp

from lmtrain.objectives.logits import Chunks
from lmtrain.sharding.local import sum_over

# The cumulative sum runs over blocks of the vocabulary, then within the selected block: accurate enough in float32.
_BLOCK = 128


def sample_targets(
    hidden_BSD: jax.Array, head_VD: jax.Array, key: jax.Array, vocab_size: int, logit_cap: float | None = None
) -> jax.Array:
    """A token for each position, sampled from the softmax of the logits `hidden @ head.T`, capped if there is a cap.
    -> int32 [B, S]

    One uniform number per position, generated from `key` alone, is looked up in the cumulative probabilities: except
    for rounding, the samples do not depend on how rows and vocabulary are split.
    """
    chunks = Chunks.of(hidden_BSD, head_VD, vocab_size, logit_cap)
    uniform_BS = jax.random.uniform(key, hidden_BSD.shape[:2])
    drawn: jax.Array = chunks.map_rows(functools.partial(_draw, chunks), hidden_BSD, head_VD, uniform_BS)
    return drawn


def _draw(chunks: Chunks, logits_TV: jax.Array, head: jax.Array, uniform_T: jax.Array) -> jax.Array:
    """The token at which the cumulative probability exceeds `uniform_T`, [T]."""
    highest = logits_TV.max(-1)
    if chunks.vocab:
        highest = jax.lax.pmax(highest, chunks.vocab)
    weights = jnp.pad(jnp.exp(logits_TV - highest[:, None]), ((0, 0), (0, -len(head) % _BLOCK)))
    blocks_TNb = weights.reshape(len(weights), -1, _BLOCK)
    until_TN = jnp.cumsum(blocks_TNb.sum(-1), axis=-1)
    rest_T, is_mine = _share(chunks, until_TN[:, -1], uniform_T)
    block_T = jnp.minimum((until_TN <= rest_T[:, None]).sum(-1), until_TN.shape[1] - 1)
    skipped = jnp.take_along_axis(jnp.pad(until_TN, ((0, 0), (1, 0))), block_T[:, None], axis=1)
    inside_Tb = jnp.cumsum(jnp.take_along_axis(blocks_TNb, block_T[:, None, None], axis=1)[:, 0], axis=-1)
    column_T = block_T * _BLOCK + jnp.minimum((inside_Tb <= rest_T[:, None] - skipped).sum(-1), _BLOCK - 1)
    token_T = jnp.minimum(chunks.first_token(head) + column_T, chunks.vocab_size - 1)
    return sum_over(chunks.vocab, jnp.where(is_mine, token_T, 0)).astype(jnp.int32)


def _share(chunks: Chunks, weight_T: jax.Array, uniform_T: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
    """The cumulative weight to reach in this device's part of the vocabulary, and whether the token is in this part."""
    if not chunks.vocab:
        return uniform_T * weight_T, True
    until_PT = jnp.cumsum(jax.lax.all_gather(weight_T, chunks.vocab), axis=0)
    wanted_T = uniform_T * until_PT[-1]
    owner_T = jnp.minimum((until_PT <= wanted_T).sum(0), len(until_PT) - 1)
    before_T = jnp.take_along_axis(jnp.pad(until_PT, ((1, 0), (0, 0))), owner_T[None], axis=0)[0]
    return wanted_T - before_T, owner_T == jax.lax.axis_index(chunks.vocab)
