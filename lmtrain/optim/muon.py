"""Muon: which dimensions of which parameters are matrices to orthogonalize. The algorithm is optax's."""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from lmtrain.optim.config import MuonConfig

# Along these a parameter holds many matrices, each orthogonalized by itself.
_STACKED = ("layers", "qkv", "senses")


def muon_or_adam(config: MuonConfig, axes: Any) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks; Adam, `adam_lr / learning_rate` times as large, for everything else."""
    numbers = jax.tree.map(matrix_dims, axes, is_leaf=lambda names: isinstance(names, tuple))
    labels = jax.tree.map(
        lambda number: "adam" if number == () else "muon",
        numbers,
        is_leaf=lambda number: isinstance(number, tuple),
    )

    def dims(params: Any) -> Any:
        """As the parameters that reach Muon: with a masked node where there is none."""
        return jax.tree.map(
            lambda param, number: param if isinstance(param, optax.MaskedNode) else number,
            params,
            numbers,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )

    muon = optax.chain(
        scale_by_muon(
            ns_steps=config.backend_steps,
            beta=config.momentum,
            eps=config.muon_epsilon,
            nesterov=config.nesterov,
            weight_dimension_numbers=dims,
        ),
        optax.stateless(lambda updates, _: _scale_by_shape(config, updates, dims(updates))),
    )
    adam = optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.scale(config.adam_lr / config.learning_rate),
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _scale_by_shape(config: MuonConfig, updates: Any, numbers: Any) -> Any:
    """Times sqrt(max(1, outputs / inputs)), or 0.2 sqrt(max(inputs, outputs)) with `use_kimi_scaling`."""

    def scale(update: Any, number: Any) -> Any:
        if isinstance(update, optax.MaskedNode):
            return update
        inputs, outputs = (math.prod(update.shape[dim] for dim in dims) for dims in number)
        if config.use_kimi_scaling:
            return update * (0.2 * math.sqrt(max(inputs, outputs)))
        return update * math.sqrt(max(1.0, outputs / inputs))

    return jax.tree.map(scale, updates, numbers, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def matrix_dims(axes: tuple[str | None, ...]) -> MuonDimensionNumbers | tuple[()]:
    """The input and output dimensions of a parameter with these logical names; () if it is no matrix of a layer.

    >>> matrix_dims(("layers", "heads", "head_dim", "embed"))
    MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))
    """
    own = [dim for dim, name in enumerate(axes) if name not in _STACKED]
    if "embed" not in axes or "vocab" in axes or "position" in axes or len(own) < 2:
        return ()
    split = own.index(axes.index("embed"))
    first, rest = (own[:1], own[1:]) if split == 0 else (own[:split], own[split:])
    return MuonDimensionNumbers(tuple(first), tuple(rest))
