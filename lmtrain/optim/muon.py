"""Muon: momentum, orthogonalized per matrix; Adam for parameters that are not matrices of a layer.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": with g the gradient,

    m <- beta m + (1 - beta) g;   u = beta m + (1 - beta) g with Nesterov's momentum, else m;   update = NS(u)

NS is five steps of the Newton-Schulz iteration x <- a x + (b x x^T + c (x x^T)^2) x from u / |u|, which brings the
singular values near 1; a, b and c are the setting `coefficients`. The momentum's bias is not corrected: NS does not
depend on the length of u.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from lmtrain.optim.config import MuonConfig
from lmtrain.optim.transforms import in_float32, scale_by_adam, widen
from lmtrain.sharding.axes import Axes
from lmtrain.sharding.local import spread

# Axes along which a parameter stacks matrices; each matrix is orthogonalized separately.
_STACKED = ("layers", "qkv", "senses", "expert")


def muon_or_adam(config: MuonConfig, axes: Any) -> optax.GradientTransformation:
    """Muon for the blocks' matrices; Adam, scaled by `adam_lr / learning_rate`, for all other parameters."""
    numbers = _matrices(axes)
    muon = optax.chain(
        _orthogonalized_momentum(config, numbers),
        optax.stateless(lambda updates, _: _map_matrices(partial(_scale_by_shape, config), updates, numbers)),
    )
    adam = optax.chain(
        in_float32(scale_by_adam(config), narrow=["mu"]),
        optax.scale(config.adam_lr / config.learning_rate),
    )
    return optax.partition({"muon": muon, "adam": adam}, labels_of(axes))


def labels_of(axes: Any) -> Any:
    """`muon` or `adam` for each parameter; `axes` has the logical names of its dimensions."""
    return jax.tree.map(
        lambda number: "muon" if number else "adam", _matrices(axes), is_leaf=lambda number: isinstance(number, tuple)
    )


def _matrices(axes: Any) -> Any:
    return jax.tree.map(matrix_dims, axes, is_leaf=lambda names: isinstance(names, tuple))


def _map_matrices(function: Callable[[jax.Array, MuonDimensionNumbers], jax.Array], updates: Any, numbers: Any) -> Any:
    """Apply `function` to the updates of matrices; those of Adam's parameters are masked nodes, which stay."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(
        lambda x, number: x if is_masked(x) else function(x, number), updates, numbers, is_leaf=is_masked
    )


def _orthogonalized_momentum(config: MuonConfig, numbers: Any) -> optax.GradientTransformation:
    beta = config.momentum

    def init(params: Any) -> MuonState:
        coefficients = jnp.asarray(config.coefficients)
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), coefficients)

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            mean: jax.Array = beta * widen(old) + (1 - beta) * widen(new)
            return mean.astype(old.dtype)

        momentum = jax.tree.map(average, state.mu, gradients)
        ahead = jax.tree.map(average, momentum, gradients) if config.nesterov else momentum
        updates = _map_matrices(partial(_orthogonalize, config), ahead, numbers)
        return updates, MuonState(optax.safe_increment(state.count), momentum, state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def _orthogonalize(config: MuonConfig, x: jax.Array, number: MuonDimensionNumbers) -> jax.Array:
    """Orthogonalize each matrix of a parameter, on one device each: with split matrices, every iteration gathers."""
    inputs, outputs = tuple(number.reduction_axis), tuple(number.output_axis)
    stacked = tuple(dim for dim in range(x.ndim) if dim not in inputs + outputs)
    order = stacked + inputs + outputs
    back = tuple(order.index(dim) for dim in range(x.ndim))
    ordered = x.transpose(order)
    rows, columns = (math.prod(x.shape[dim] for dim in dims) for dims in (inputs, outputs))
    matrices = spread(ordered.reshape(-1, rows, columns))
    matrices = spread(_newton_schulz(config, matrices))
    return matrices.reshape(ordered.shape).transpose(back)


def _newton_schulz(config: MuonConfig, x_NIO: jax.Array) -> jax.Array:
    a, b, c = config.coefficients
    tall = x_NIO.shape[1] > x_NIO.shape[2]
    x = x_NIO.swapaxes(1, 2) if tall else x_NIO
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + config.muon_epsilon)
    for _ in range(config.backend_steps):
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.swapaxes(1, 2) if tall else x


def _scale_by_shape(config: MuonConfig, update: jax.Array, number: MuonDimensionNumbers) -> jax.Array:
    """Scale by sqrt(max(1, outputs / inputs)), or by 0.2 sqrt(max(inputs, outputs)) with `use_kimi_scaling`."""
    inputs, outputs = (math.prod(update.shape[dim] for dim in dims) for dims in number)
    if config.use_kimi_scaling:
        return update * (0.2 * math.sqrt(max(inputs, outputs)))
    return update * math.sqrt(max(1.0, outputs / inputs))


def matrix_dims(axes: Axes) -> MuonDimensionNumbers | tuple[()]:
    """The input and output dimensions of a parameter with these logical names; () if it is not a layer's matrix.

    >>> matrix_dims(Axes(("layers", "heads", "head_dim", "embed"), outputs=1))
    MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))
    """
    if not axes.outputs or "router" in axes:
        return ()
    own = [dim for dim, name in enumerate(axes) if name not in _STACKED]
    inputs, outputs = ([dim for dim in own if (dim >= len(axes) - axes.outputs) == last] for last in (False, True))
    return MuonDimensionNumbers(tuple(inputs), tuple(outputs))
