"""Metrics from inside the compiled step, as outputs of it: no callback to the host, and one program.

Models `self.sow("metrics", name, value)`; any other function of the step calls `jit_log({name: value})`, which within a
module is the same. Both name a metric as it is to be logged, such as `train/entropy`; of several values of one name (of
several layers, calls, microbatches) the mean is taken, so that scanned and unrolled layers say the same.

    def router(scores_BE):
        jit_log({"train/router_entropy": entropy(scores_BE)})

Outside a training step, in evaluation and sampling, nothing is collected and nothing is computed. An `nn.scan` of one's
own needs `"metrics": 0` among its `variable_axes`, as in `lmtrain.models.layers.stack`: Flax drops values without it.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from jax.extend.core import get_opaque_trace_state

# The collection of variables that models sow into.
METRICS = "metrics"


class _Open(threading.local):
    """The places that collect, the innermost last; each thread traces for itself."""

    def __init__(self) -> None:
        self.collectors: list[Collected] = []


class Collected:
    """What was logged while a function was traced."""

    def __init__(self) -> None:
        self._trace = get_opaque_trace_state()
        self._values: dict[str, list[tuple[jax.Array, int]]] = {}  # means, and of how many each is

    def add(self, name: str, value: Any, count: int = 1) -> None:
        if get_opaque_trace_state() != self._trace:
            raise _no_way_out(name)
        self._values.setdefault(name, []).append((_mean(value), count))

    def add_sown(self, variables: Mapping[str, Any]) -> None:
        """The collection `METRICS` of a model's variables, by the names that were sown, wherever in the model."""
        for path, value in jax.tree_util.tree_leaves_with_path(variables.get(METRICS, {})):
            names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
            self.add(names[-1], value, jnp.size(value))  # of scanned layers each counts, as where they are not scanned

    @property
    def means(self) -> dict[str, jax.Array]:
        """Float32 scalars by name."""
        columns = {name: zip(*values, strict=True) for name, values in self._values.items()}
        return {
            name: jnp.average(jnp.stack(values), weights=jnp.asarray(counts, jnp.float32))
            for name, (values, counts) in columns.items()
        }


_open = _Open()


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect what is logged within; the values are to be returned from the traced function that this stands in."""
    collected = Collected()
    _open.collectors.append(collected)
    try:
        yield collected
    finally:
        _open.collectors.remove(collected)


def jit_log(metrics: Mapping[str, Any]) -> None:
    """Log values with the metrics of this step: arrays, whose mean is taken, by name.

    Raises `ValueError` within a transformation of one's own that values cannot leave, except in a module, whose lifted
    transformations (`nn.scan`, `nn.remat`) carry them out.
    """
    module = nn.module._context.module_stack[-1]
    scope = None if module is None else module.scope  # a module that is not applied to variables has none
    if scope is not None and not scope.is_mutable_collection(METRICS):
        return  # nobody collects
    for name, value in metrics.items():
        if module is not None and scope is not None:
            if current_trace() != scope.trace_level:
                raise _no_way_out(name)
            module.sow(METRICS, name, _mean(value))
        elif _open.collectors:
            _open.collectors[-1].add(name, value)


def _mean(value: Any) -> jax.Array:
    return jnp.mean(jnp.asarray(value, jnp.float32))


def _no_way_out(name: str) -> ValueError:
    return ValueError(
        f"jit_log: {name!r} is logged within a jax.lax.scan, jax.lax.cond, jax.checkpoint, jax.grad, jax.vmap or "
        "jax.jit of its own, out of which no value comes by itself: return it from there, and log it outside"
    )
