"""Kernels against plain attention: inputs, outputs and gradients."""

import jax
import numpy as np

from lmtrain.models.attention.kernel import self_attend

BATCH = 2


def arrays(heads: int, kv_heads: int, length: int, width: int = 8, columns: int | None = None) -> list[np.ndarray]:
    """Queries, keys, values, and the gradient of the output; values have `columns`, by default `width`."""
    rng = np.random.default_rng(length)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, columns or width), (heads, columns or width)]
    return [rng.normal(size=(BATCH, number, length, dim)).astype(np.float32) for number, dim in sizes]


def documents(ends, length: int) -> np.ndarray:
    """Segments [batch, length] of documents that end before these positions."""
    return (np.arange(length) >= np.array(ends)[..., None]).sum(1)


def run(kernel: str, inputs, scale: float = 0.3, ends=None, **options) -> dict[str, jax.Array]:
    """The output, and the gradients of queries, keys and values."""
    if ends is not None:
        options["segments"] = documents(ends, inputs[0].shape[2])

    def both(q, k, v, d):
        mixed, pull = jax.vjp(lambda *qkv: self_attend(kernel, *qkv, scale, **options), q, k, v)
        return {"mixed": mixed} | dict(zip(["dq", "dk", "dv"], pull(d), strict=True))

    return jax.jit(both)(*inputs)


def assert_plain(kernel: str, inputs, rtol: float, atol: float, block_size: int | None = None, **options) -> None:
    """The kernel's output and gradients are those of plain attention."""
    computed = run(kernel, inputs, block_size=block_size, **options)
    for name, expected in run("xla", inputs, **options).items():
        np.testing.assert_allclose(computed[name], expected, rtol=rtol, atol=atol, err_msg=name)
