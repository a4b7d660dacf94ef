"""The dtype of an optimizer's moments when parameters and gradients have fewer bits than float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def in_float32(inner: optax.GradientTransformation, narrow: Sequence[str] = ()) -> optax.GradientTransformation:
    """`inner`, computed in float32, with a float32 state; updates keep their dtype. The fields `narrow` of the state,
    trees like the parameters, are stored in the dtype of the parameters.

    Averages of squared gradients have to be float32: with a decay of 0.999 they fall by 0.1 % in a step at most, which
    bfloat16 rounds away, so that they would never fall. First moments, with decays up to 0.99, move in bfloat16.
    """

    def init(params: Any) -> Any:
        state = inner.init(widen(params))
        return state._replace(**{name: _like(getattr(state, name), params) for name in narrow})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stored = {name: getattr(state, name) for name in narrow}
        wide = state._replace(**{name: widen(tree) for name, tree in stored.items()})
        new_updates, new = inner.update(widen(updates), wide, None if params is None else widen(params))
        new = new._replace(**{name: _like(getattr(new, name), tree) for name, tree in stored.items()})
        return _like(new_updates, updates), new

    return optax.GradientTransformation(init, update)


def widen(tree: Any) -> Any:
    """The tree with arrays of fewer bits than float32 in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)
