"""Ahead-of-time compilation of the step, to log how long it takes."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh_function import MeshFunction


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
