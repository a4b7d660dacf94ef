"""Kernels against plain attention: inputs, outputs and gradients."""

import jax
import numpy as np

from lmtrain.models.attention.kernel import self_attend, self_attend_latent

BATCH = 2
SINKS = np.float32([-1.0, 0.5, 2.0, 3.0])  # of four heads


def arrays(heads: int, kv_heads: int, length: int, width: int = 8, columns: int | None = None) -> list[np.ndarray]:
    """Queries, keys, values, and the gradient of the output; values have `columns`, by default `width`."""
    rng = np.random.default_rng(length)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, columns or width), (heads, columns or width)]
    return [rng.normal(size=(BATCH, number, length, dim)).astype(np.float32) for number, dim in sizes]


def latent_arrays(heads: int, length: int, nope: int, rope: int, values: int) -> list[np.ndarray]:
    """The arrays of latent attention, and the gradient of the output."""
    rng = np.random.default_rng(length)
    sizes = [(heads, nope + rope), (heads, nope + values), (1, rope), (heads, values)]
    return [rng.normal(size=(BATCH, number, length, dim)).astype(np.float32) for number, dim in sizes]


def documents(ends, length: int) -> np.ndarray:
    """Segments [batch, length] of documents that end before these positions."""
    return (np.arange(length) >= np.array(ends)[..., None]).sum(1)


def run(kernel: str, inputs, scale: float = 0.3, ends=None, **options) -> dict[str, jax.Array]:
    """The output, and the gradients of queries, keys, values and sinks."""
    if ends is not None:
        options["segments"] = documents(ends, inputs[0].shape[2])
    sinks = {"sinks": jax.numpy.asarray(options.pop("sinks"))} if "sinks" in options else {}

    def both(q, k, v, d, sinks):
        attend = self_attend if k.shape[-1] == q.shape[-1] else self_attend_latent

        def mix(q, k, v, sinks):
            return attend(kernel, q, k, v, scale, **options, **sinks)

        mixed, pull = jax.vjp(mix, q, k, v, sinks)
        *of_arrays, of_sinks = pull(d)
        return {"mixed": mixed} | dict(zip(["dq", "dk", "dv"], of_arrays, strict=True)) | of_sinks

    return jax.jit(both)(*inputs, sinks)


def assert_plain(kernel: str, inputs, rtol: float, atol: float, block_size: int | None = None, **options) -> None:
    """The kernel's output and gradients are those of plain attention."""
    computed = run(kernel, inputs, block_size=block_size, **options)
    for name, expected in run("xla", inputs, **options).items():
        np.testing.assert_allclose(computed[name], expected, rtol=rtol, atol=atol, err_msg=name)
