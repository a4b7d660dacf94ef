"""Estimates of the diagonal of the loss's Hessian, for Sophia (Liu et al. 2023, algorithms 1 and 2).

They are computed without dropout and over the same microbatches as the gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from lmtrain.models.interface import MAIN, LanguageModel, Outputs, outputs_of
from lmtrain.objectives.cross_entropy import CrossEntropyRow, sample_targets
from lmtrain.objectives.interface import Loss, sum_of_weights
from lmtrain.objectives.row_losses import sum_of_row_losses


class Highest(struct.PyTreeNode):
    """A value of which `sum_over_microbatches` takes the highest, 0 or more."""

    value: jax.Array


def _joined(total: Any, part: Any) -> Any:
    if isinstance(total, Highest):
        return jax.tree.map(jnp.maximum, total, part)
    return total + part.astype(total.dtype)


def sum_over_microbatches(
    function: Callable[[Any, jax.Array], Any], batch: Any, key: jax.Array, num_microbatches: int
) -> Any:
    """Sum of `function(microbatch, its own key)`: a tree of sums, in float32 if there are several microbatches."""
    if num_microbatches == 1:
        return function(batch, jax.random.fold_in(key, 0))
    # microbatch i has rows i, i + n, ...: so each spans all devices; contiguous parts of the batch would not
    split = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(sums: Any, indexed: Any) -> tuple[Any, None]:
        index, micro = indexed
        new = function(micro, jax.random.fold_in(key, index))
        return jax.tree.map(_joined, sums, new, is_leaf=lambda leaf: isinstance(leaf, Highest)), None

    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), jax.eval_shape(function, first, key))
    sums, _ = jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), split))
    return sums


def estimate_hessian(
    method: str,
    model: LanguageModel,
    loss: Loss,
    params: Any,
    batch: Any,
    key: jax.Array,
    num_microbatches: int,
) -> Any:
    """The Hessian diagonal of the batch's mean of `loss`: a float32 tree with the structure of the parameters.

    hutchinson             u * (H u) with u drawn from a normal distribution: unbiased
    gauss_newton_bartlett  n g^2, where g is the gradient of the mean loss of n targets sampled from the model's own
                           prediction: never negative. The loss is the cross-entropy with the weights of the loss,
                           without label smoothing and z-loss.
    """
    count = sum_of_weights(loss, batch)
    draw_key, sample_key = jax.random.split(key)
    if method == "hutchinson":
        direction = optax.tree.random_like(draw_key, params, jax.random.normal)

        def product(micro: Any, key: jax.Array) -> Any:
            gradient = jax.grad(lambda p: loss.loss_sum(_outputs(model, p, micro), micro).total)
            return jax.jvp(gradient, (params,), (direction,))[1]

        total = sum_over_microbatches(product, batch, sample_key, num_microbatches)
        return jax.tree.map(lambda u, hu: u.astype(jnp.float32) * hu.astype(jnp.float32) / count, direction, total)

    assert method == "gauss_newton_bartlett", method

    def sampled(micro: Any, key: jax.Array) -> Any:
        targets = sample_targets(_outputs(model, params, micro)[MAIN], key)
        weights = loss.weights(micro)
        # gradients of positions are independent, and the weights apply to their squares
        roots = weights if weights.dtype == bool else jnp.sqrt(weights)

        def of_targets(p: Any) -> jax.Array:
            return sum_of_row_losses(CrossEntropyRow(), _outputs(model, p, micro)[MAIN], targets, roots)

        return jax.grad(of_targets)(params)

    total = sum_over_microbatches(sampled, batch, sample_key, num_microbatches)
    return jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)) / count, total)


def _outputs(model: LanguageModel, params: Any, batch: Any) -> Outputs:
    outputs: Outputs = model.apply({"params": params}, batch, True, method=outputs_of)
    return outputs
