"""Ahead-of-time compilation of the step, to log how long it takes; the table of layouts, and MFU."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from clu.parameter_overview import make_table
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, flatten
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.axes import as_names
from lmtrain.sharding.mesh import Layout, MeshFunction


class CompilingStep:
    """The train step, compiled at the first batch of each size; each compilation is logged."""

    def __init__(self, step: MeshFunction):
        self._step = step
        self._known: set[tuple[int, ...]] = set()

    def is_new(self, batch: Any) -> bool:
        """Whether the next call has to compile."""
        return batch["tokens"].shape not in self._known

    def compile(self, state: Any, batch: Any, requests: Any = None) -> dict[str, float]:
        """Compile for batches of this shape. The next call reuses the program, which JAX caches by its arguments.

        Returns `compile/tracing_seconds`, and `compile/seconds` in XLA or its cache.
        """
        began = time.perf_counter()
        lowered = self._step.lower(state, batch, requests)
        traced = time.perf_counter()
        lowered.compile()
        done = time.perf_counter()
        shape = batch["tokens"].shape
        self._known.add(shape)
        log.info(
            f"compiled the step for {shape[0]} sequences of {shape[1]} tokens: {traced - began:.1f} s of tracing, "
            f"{done - traced:.1f} s of XLA"
        )
        return {"compile/tracing_seconds": traced - began, "compile/seconds": done - traced}

    def __call__(self, state: Any, batch: Any, requests: Any = None) -> Any:
        return self._step(state, batch, requests)


@contextmanager
def compilation_cache(folder: str | None) -> Iterator[None]:
    """Cache compiled programs in `folder` within this context, for the next start; None keeps JAX's settings."""
    if folder is None:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": os.path.expanduser(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache_of_jax.reset_cache()  # JAX opens the cache once, with the settings at that time


@dataclass(frozen=True, kw_only=True)
class _ParameterRow:
    parameter: str
    dimensions: str
    size: int
    on_each_device: str


def layout_table(model: LanguageModel, layout: Layout, abstract: Any) -> list[str]:
    """A table of the parameters: dimensions by name, size and mesh axis, number of scalars, and bytes per device.

    `abstract` are the parameters as they are stored.
    """
    as_stored = flatten(abstract)
    boxes: Any = jax.tree_util.tree_leaves_with_path(
        abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    rules = dict(layout.parameter_rules)
    rows = []
    for place, box in boxes:
        named = list(zip(box.names, box.value.shape, strict=True))
        dims = [f"{name} {size:,}{_over(rules.get(name), layout)}" if name else f"{size:,}" for name, size in named]
        parts = math.prod(layout.mesh.shape[axis] for name in box.names for axis in as_names(rules.get(name)))
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        # a matrix in few bits has several arrays
        arrays = [leaf for path, leaf in as_stored.items() if path == name or path.startswith(f"{name}_")]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) // parts
        rows.append(
            _ParameterRow(
                parameter=name,
                dimensions=", ".join(dims),
                size=math.prod(box.value.shape),
                on_each_device=format_bytes(size),
            )
        )
    lines: list[str] = make_table(rows).splitlines()
    lines[1] = lines[1].replace("_", " ")  # headings are field names of _ParameterRow
    return lines


def _over(mesh_axes: str | tuple[str, ...] | None, layout: Layout) -> str:
    """`/data 4` for a dimension split into four parts; empty for one that is not split."""
    split = [f"{axis} {layout.mesh.shape[axis]}" for axis in as_names(mesh_axes) if layout.mesh.shape[axis] > 1]
    return f"/{'+'.join(split)}" if split else ""


# FLOPs per token and model FLOPs utilization (MFU).
#
# MFU is the model's FLOPs per second, over the peak of all devices, in percent. The FLOPs are those of the matrix
# products of a forward pass, and twice as many for the backward pass; recomputation does not count. `mfu` counts
# attention as if every token attended to all others (as in Chowdhery et al. 2022, PaLM, appendix B, and most published
# figures); `mfu_causal` counts the half that a causal model needs.


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token of forward and backward pass, and peak FLOPs per second of all devices together, None if
    unknown."""

    flops_per_token: float
    causal_flops_per_token: float
    peak_flops: float | None

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        """Metrics of a speed: GFLOP/s, and MFU in percent if the peak is known."""
        achieved = self.flops_per_token * tokens_per_second
        rates = {"throughput/gflops_per_second": achieved / 1e9}
        if self.peak_flops is not None:
            rates["throughput/mfu"] = 100 * achieved / self.peak_flops
            rates["throughput/mfu_causal"] = 100 * self.causal_flops_per_token * tokens_per_second / self.peak_flops
        return rates
