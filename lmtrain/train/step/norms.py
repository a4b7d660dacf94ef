"""Norms of gradients, parameters and updates, every few steps; and whether all replicas agree.

They are computed on the device within the step, and only in the steps that log them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.run.trainer import WatchConfig
from lmtrain.runtime.logging import Processes
from lmtrain.sharding.mesh import Layout

# Key of a step's metrics that holds the norms.
WATCH = "watch"
# Watch target -> prefix of its metric names.
_PREFIXES = {"grads": "grad", "params": "params", "updates": "updates"}


class Watch:
    """Norms of the watched trees. `axes`: logical axis names of each parameter; stacked ones start with `layers`.
    `layers`: the numbers of the layers over which the parameters of a module are stacked, by its path; without it, all.
    """

    def __init__(self, config: WatchConfig, axes: Any, layers: Mapping[str, Sequence[int]] | None = None):
        self._config = config
        self._layers = dict(layers or {})
        self._num_layers = 1 + max((max(numbers) for numbers in self._layers.values()), default=0)
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
                for layer, value in zip(
                    self._layers.get(name.rpartition("/")[0], range(len(values))), values, strict=True
                ):
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
                numbers = self._layers.get(path.rpartition("/")[0])
                if numbers is not None:
                    square = jnp.zeros(self._num_layers).at[jnp.array(numbers)].set(square)
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


# Agreement of a run's processes on when to save, to stop, or to wait for each step.
#
# The request of a single process is granted at once. With several processes, the requests are a small array that is an
# input of the compiled step; the step computes the maximum of each and returns it to every process. All of them
# therefore save after the same step, without communication between hosts beyond what the step exchanges anyway.


class Requests(NamedTuple):
    """Requests of a process. `save`: a checkpoint is due by the clock; `stop`: a signal requests the end of the run;
    `wait`: steps are long, so the next one starts only when this one is finished, since a signal cannot interrupt it.
    """

    save: bool = False
    stop: bool = False
    wait: bool = False

    def __or__(self, other: "Requests") -> "Requests":
        return Requests(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


class Agreement:
    """Agreement between the processes of a run. Call `on_devices` and then `learn` for every step."""

    def __init__(self, processes: Processes, layout: Layout):
        self._alone = processes.count == 1
        self._sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        self._known = Requests()
        self._waits = True  # until the first step is known not to be long
        self._saved = 0

    def on_devices(self, mine: Requests) -> Any:
        """The next step's input: this process's requests, [devices, number of requests], one row per device.

        None for a run of one process.
        """
        if self._alone:
            return None
        local = np.tile(np.array(mine, np.int32), (jax.local_device_count(), 1))
        return jax.make_array_from_process_local_data(self._sharding, local)

    def learn(self, step: int, greatest: Any) -> None:
        """Record the requests of all processes: `greatest` [number of requests], as a step returned it, or None."""
        if greatest is None:
            return
        of_step = Requests(*(bool(request) for request in greatest))
        self._known |= Requests(of_step.save and step > self._saved, of_step.stop)
        self._waits = of_step.wait

    def waits(self, mine: Requests) -> bool:
        """Whether all processes wait for the running step before they start the next one."""
        return mine.wait if self._alone else self._waits

    def granted(self, mine: Requests) -> Requests:
        """The requests that all processes fulfil after this step."""
        if self._alone:
            return mine
        known, self._known = self._known, Requests()
        return known

    def saved(self, step: int) -> None:
        """Mark the save requests of steps up to this one as fulfilled."""
        self._saved = step
