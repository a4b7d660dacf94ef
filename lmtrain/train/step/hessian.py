"""Estimates of the diagonal of the loss's Hessian, for Sophia (Liu et al. 2023, algorithms 1 and 2).

Without dropout, and over the same microbatches as the gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.interface import LanguageModel, hidden_and_head
from lmtrain.train.step.loss import next_token_targets, summed_cross_entropy
from lmtrain.train.step.microbatches import sum_over_microbatches
from lmtrain.train.step.sample_targets import sample_targets


def estimate_hessian(
    method: str, model: LanguageModel, params: Any, batch: Any, key: jax.Array, num_microbatches: int
) -> Any:
    """The diagonal for the mean loss of the batch, as the parameters, float32.

    hutchinson             u * (H u) with u drawn from a normal distribution: unbiased
    gauss_newton_bartlett  n g^2, g being the gradient of the mean loss of n targets drawn from the model's own
                           prediction: never negative
    """
    count = jnp.maximum(batch["loss_mask"].sum().astype(jnp.float32), 1.0)
    draw_key, sample_key = jax.random.split(key)
    if method == "hutchinson":
        direction = _normal_like(draw_key, params)

        def product(micro: Any, key: jax.Array) -> Any:
            gradient = jax.grad(lambda p: _loss_sum(model, p, micro, next_token_targets(micro["tokens"])))
            return jax.jvp(gradient, (params,), (direction,))[1]

        total = sum_over_microbatches(product, batch, sample_key, num_microbatches)
        return jax.tree.map(lambda u, hu: u.astype(jnp.float32) * hu.astype(jnp.float32) / count, direction, total)

    assert method == "gauss_newton_bartlett", method

    def sampled(micro: Any, key: jax.Array) -> Any:
        hidden, head = _hidden(model, params, micro)
        targets = sample_targets(hidden, head, key, model.vocab_size)
        return jax.grad(lambda p: _loss_sum(model, p, micro, targets))(params)

    total = sum_over_microbatches(sampled, batch, sample_key, num_microbatches)
    return jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)) / count, total)


def _loss_sum(model: LanguageModel, params: Any, batch: Any, targets: jax.Array) -> jax.Array:
    return summed_cross_entropy(*_hidden(model, params, batch), targets, batch["loss_mask"], model.vocab_size)


def _hidden(model: LanguageModel, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array] = model.apply({"params": params}, batch, True, method=hidden_and_head)
    return found


def _normal_like(key: jax.Array, params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)
