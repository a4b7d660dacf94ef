"""Kernels with queries that are a part of the sequence equal that part of attention of the entire sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.attention.attend import Options, alibi_slopes, attend
from lmtrain.models.attention.kernel import kernel_of, kernels

LENGTH, SIZE = 192, 48


def arrays():
    rng = np.random.default_rng(0)
    q, k, v, d = (jnp.asarray(rng.normal(size=(2, heads, LENGTH, 16)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1), jnp.int32)
    return q, k, v, d[:, :, :SIZE], segments


def test_these_kernels_support_it():
    assert [kernel.name for kernel in kernels() if "part" in kernel.features] == ["triton", "blockwise", "xla"]


@pytest.mark.parametrize("name", ["xla", "blockwise", "triton"])
@pytest.mark.parametrize("first", [0, 40, LENGTH - SIZE])
@pytest.mark.parametrize("window", [None, 30])
def test_a_part_of_the_queries_gives_that_part_of_the_result(name, first, window):
    q, k, v, d, segments = arrays()
    slopes = alibi_slopes(4, 8)

    def part(q, k, v, first):
        options = Options(segments=segments, window=window, slopes=slopes, first_query=first, block_size=32)
        return kernel_of(name).call(q[:, :, :SIZE], k, v, 0.25, options)

    def whole(q, k, v):
        both = (segments, segments)
        mixed = attend(q, k, v, 0.25, segments=both, window=window, slopes=slopes)
        return mixed[:, :, first : first + SIZE]

    expected, pull = jax.vjp(whole, q, k, v)
    moved = jnp.roll(q, -first, axis=2)
    # the position is only known when the program runs
    found, pull_part = jax.jit(lambda *x: jax.vjp(lambda q, k, v: part(q, k, v, x[3]), *x[:3]))(
        moved, k, v, jnp.int32(first)
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    d_q, d_k, d_v = pull(d)
    for ours, theirs in zip(pull_part(d), (jnp.roll(d_q, -first, axis=2), d_k, d_v), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
