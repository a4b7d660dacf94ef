"""Metrics from inside the compiled step, as outputs of it: no callback to the host, and one program.

Models `self.sow("metrics", name, value)`; any other function of the step calls `jit_log({name: value})`, which within a
module is the same. Both name a metric as it is to be logged, such as `train/entropy`; of several values of one name (of
several layers, calls, microbatches) the mean is taken, so that scanned and unrolled layers say the same.

    def router(scores_BE):
        jit_log({"train/router_entropy": entropy(scores_BE)})

Outside a training step, in evaluation and sampling, nothing is collected and nothing is computed.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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
        self._values: dict[str, list[jax.Array]] = {}

    def add(self, name: str, value: Any) -> None:
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                f"jit_log: {name!r} is logged within a jax.lax.scan, jax.lax.cond, jax.checkpoint or jax.grad "
                "of its own, out of which no value comes by itself: return it from there, and log it outside"
            )
        self._values.setdefault(name, []).append(jnp.mean(jnp.asarray(value, jnp.float32)))

    def add_sown(self, variables: Mapping[str, Any]) -> None:
        """The collection `METRICS` of a model's variables, by the names that were sown, wherever in the model."""
        for path, value in jax.tree_util.tree_leaves_with_path(variables.get(METRICS, {})):
            names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
            self.add(names[-1], value)

    @property
    def means(self) -> dict[str, jax.Array]:
        """Float32 scalars by name."""
        return {name: jnp.mean(jnp.stack(values)) for name, values in self._values.items()}


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
    for name, value in metrics.items():
        if module is not None:
            module.sow(METRICS, name, jnp.mean(jnp.asarray(value, jnp.float32)))
        elif _open.collectors:
            _open.collectors[-1].add(name, value)
