"""Grouped products of a mixture of experts on this device, compared with one product of the same number of rows.

    .venv/bin/python tools/bench/grouped.py [--repeat 10]

The rows of random routing, forward and backward, in float32 on CPUs and bfloat16 elsewhere. The floor is a product
with one matrix for all rows: the time of the active FLOPs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.moe.grouped import choose_grouped, grouped

# tokens, experts of a token, experts, inputs, outputs
SHAPES = {
    "moe_nano": (4096, 2, 8, 128, 168),
    "8 experts": (4096, 2, 8, 512, 1024),
    "128 experts": (4096, 8, 128, 512, 256),
    "128 experts, wide": (2048, 8, 128, 1024, 768),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    platform = jax.default_backend()
    print(f"{jax.devices()[0].device_kind}, kernel {choose_grouped(platform, jax.devices()[0].device_kind).name}")
    for name, shape in SHAPES.items():
        one, ours = seconds(repeat, *of_shape(*shape, jnp.float32 if platform == "cpu" else jnp.bfloat16))
        print(f"{name:<18} {shape}: one matrix {one * 1e3:8.2f} ms, grouped {ours / one:.2f} x", flush=True)


def of_shape(tokens: int, active: int, experts: int, inputs: int, outputs: int, dtype: Any) -> list[Callable[[], Any]]:
    """The product with one matrix, and the grouped one, each with its gradients."""
    rows, rng = tokens * active, np.random.default_rng(0)
    sizes = jnp.asarray(np.bincount(rng.integers(0, experts, rows), minlength=experts), jnp.int32)
    x, d_y = (jnp.asarray(rng.normal(size=(rows, width)), dtype) for width in (inputs, outputs))
    kernel = jnp.asarray(rng.normal(size=(experts, inputs, outputs)), dtype)

    def with_gradients(product: Callable[..., Any]) -> Any:
        def run(x: jax.Array, kernel: jax.Array, d_y: jax.Array) -> Any:
            y, pull = jax.vjp(product, x, kernel)
            return y, pull(d_y)

        return jax.jit(run)

    one, many = with_gradients(jnp.matmul), with_gradients(lambda x, kernel: grouped(x, kernel, sizes))
    return [lambda: one(x, kernel[0], d_y), lambda: many(x, kernel, d_y)]


def seconds(repeat: int, *calls: Callable[[], Any]) -> list[float]:
    """The shortest time of each, in alternation."""
    best = [float("inf")] * len(calls)
    for _ in range(repeat + 1):  # the first compiles
        for number, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[number] = min(best[number], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
