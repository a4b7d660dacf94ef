"""Metrics from inside the compiled step, returned as its outputs: without host callbacks or a second program.

Models call `self.sow("metrics", name, value)`; any other function of the step calls `jit_log({name: value})`, which
does the same inside a module. Names are the full metric names, such as `train/entropy`. Several values of one name
(from layers, calls, microbatches) are averaged, so that scanned and unrolled layers give the same result.

    def router(scores_BE):
        jit_log({"train/router_entropy": entropy(scores_BE)})

Outside a training step, in evaluation and sampling, nothing is collected and nothing is computed. A custom `nn.scan`
needs the collections `SOWN` of `lmtrain.models.layers.stack` in its `variable_axes`, as in
`lmtrain.models.layers.stack`: Flax drops values without them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from jax.extend.core import get_opaque_trace_state

# The collection of variables that models sow into.
METRICS = "metrics"


class Collected:
    """Values logged while a function is traced."""

    def __init__(self) -> None:
        self._trace = get_opaque_trace_state()
        self._values: dict[str, list[tuple[jax.Array, int]]] = {}  # means, and the number of values of each

    def add(self, name: str, value: Any, count: int = 1) -> None:
        if get_opaque_trace_state() != self._trace:
            raise _no_way_out(name)
        self._values.setdefault(name, []).append((_mean(value), count))

    def add_sown(self, variables: Mapping[str, Any]) -> None:
        """Add the collection `METRICS` of a model's variables, by their sown names, from any module."""
        for path, value in jax.tree_util.tree_leaves_with_path(variables.get(METRICS, {})):
            names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
            self.add(names[-1], value, jnp.size(value))  # each scanned layer counts, as if unrolled

    @property
    def means(self) -> dict[str, jax.Array]:
        """Float32 scalars by name."""
        columns = {name: zip(*values, strict=True) for name, values in self._values.items()}
        return {
            name: jnp.average(jnp.stack(values), weights=jnp.asarray(counts, jnp.float32))
            for name, (values, counts) in columns.items()
        }


# The innermost active collector; each thread has its own.
_collector: ContextVar[Collected | None] = ContextVar("collector", default=None)


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect values logged in this context; return them from the traced function that contains it."""
    collected = Collected()
    token = _collector.set(collected)
    try:
        yield collected
    finally:
        _collector.reset(token)


def jit_log(metrics: Mapping[str, Any]) -> None:
    """Log values with the metrics of this step, by name; arrays are averaged.

    Raises `ValueError` inside a nested JAX transformation that values cannot leave. The lifted transformations of
    modules (`nn.scan`, `nn.remat`) return them.
    """
    module = nn.module._context.module_stack[-1]
    scope = None if module is None else module.scope  # None for a module that is not applied to variables
    if scope is not None and not scope.is_mutable_collection(METRICS):
        return  # no collector
    for name, value in metrics.items():
        if module is not None and scope is not None:
            if current_trace() != scope.trace_level:
                raise _no_way_out(name)
            module.sow(METRICS, name, _mean(value))
        elif (collector := _collector.get()) is not None:
            collector.add(name, value)


def _mean(value: Any) -> jax.Array:
    return jnp.mean(jnp.asarray(value, jnp.float32))


def _no_way_out(name: str) -> ValueError:
    return ValueError(
        f"jit_log: {name!r} is logged inside a nested jax.lax.scan, jax.lax.cond, jax.checkpoint, jax.grad, jax.vmap "
        "or jax.jit, which its value cannot leave: return it from there, and log it outside"
    )
