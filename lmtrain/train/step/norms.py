"""Norms of gradients, parameters and updates: in total, by layer and by parameter, every few steps.

They are computed on the device within the step, and only in the steps that log them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.run.trainer import WatchConfig

# Key of a step's metrics that holds the norms.
WATCH = "watch"
# Watch target -> prefix of its metric names.
_PREFIXES = {"grads": "grad", "params": "params", "updates": "updates"}


class Watch:
    """Norms of the watched trees. `axes`: logical axis names of each parameter; stacked ones start with `layers`."""

    def __init__(self, config: WatchConfig, axes: Any):
        self._config = config
        self._stacked = jax.tree.map(
            lambda names: names[0] == "layers", axes, is_leaf=lambda node: isinstance(node, tuple)
        )

    def shows(self, step: int) -> bool:
        """Whether the metrics after `step` updates include norms."""
        return bool(self._config.watch_targets) and step % self._config.interval == 0

    def on_device(self, step: jax.Array, trees: Mapping[str, Any]) -> dict[str, Any]:
        """Norms of the watched ones of the trees `grads`, `params` and `updates`, in the form that `by_name` takes.

        `step` is the number of updates including this one; in steps that log no norms, all are 0.
        """
        watched = {name: trees[name] for name in self._config.watch_targets}
        if not watched:
            return {}
        shapes = jax.eval_shape(self._compute, watched)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        shows = step % self._config.interval == 0
        return {WATCH: jax.lax.cond(shows, self._compute, lambda _: zeros, watched)}

    def by_name(self, norms: Mapping[str, Any]) -> dict[str, float]:
        """Metrics on the host: `grad/norm/total`, `grad/norm/blocks/<layer>` and optionally one per parameter.

        Without `split_scan_layers` the layers have one metric, `grad/norm/blocks`.
        """
        metrics: dict[str, float] = {}
        for target, of_target in norms.items():
            prefix = f"{_PREFIXES[target]}/norm"
            metrics[f"{prefix}/total"] = float(of_target["total"])
            for name, values in {**of_target["layers"], **of_target["parameters"]}.items():
                first, _, rest = name.partition("/")
                if values.ndim == 0:
                    metrics[f"{prefix}/{name}"] = float(values)
                    continue
                for layer, value in enumerate(values):
                    metrics["/".join([prefix, first, str(layer), *([rest] if rest else [])])] = float(value)
        return metrics

    def _compute(self, trees: dict[str, Any]) -> dict[str, Any]:
        return {name: self._norms(tree) for name, tree in trees.items()}

    def _norms(self, tree: Any) -> dict[str, Any]:
        squares = jax.tree.map(_sum_of_squares, tree, self._stacked)
        by_path = {
            jax.tree_util.keystr(path, simple=True, separator="/"): square
            for path, square in jax.tree_util.tree_leaves_with_path(squares)
        }
        layers: dict[str, Any] = {}
        for path, square in by_path.items():
            if square.ndim:  # stacks of layers are at the top level of a model: blocks/attn/...
                stack = path.partition("/")[0]
                layers[stack] = layers.get(stack, 0.0) + square
        total = sum(square.sum() for square in by_path.values())
        if not self._config.split_scan_layers:
            layers, by_path = ({name: square.sum() for name, square in each.items()} for each in (layers, by_path))
        parameters = by_path if self._config.include_per_parameter_norms else {}
        return jax.tree.map(jnp.sqrt, {"total": total, "layers": layers, "parameters": parameters})


def _sum_of_squares(leaf: jax.Array, stacked: bool) -> jax.Array:
    """The sum of squares of an array: a scalar, or one value per layer of a stack."""
    squares = jnp.square(leaf.astype(jnp.float32))
    return squares.sum(axis=tuple(range(1, leaf.ndim))) if stacked else squares.sum()
