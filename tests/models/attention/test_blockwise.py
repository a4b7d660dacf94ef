"""Blockwise attention against the plain kernel; its memory, and the blocks that it skips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.attention.compare import SINKS, arrays, assert_plain, run

from lmtrain.models.attention.attend import alibi_slopes
from lmtrain.models.attention.kernel import self_attend

# Ends of documents in the two sequences of a batch: within blocks, at their ends, and at different positions.
ENDS = [[3, 8, 19], [1, 7, 15]]

# (query heads, key heads, length, width, columns of values), options; those of the second table are long tests
SUITE = {
    "cap, window, grouped heads": ((4, 2, 21, 4), {"block_size": 8, "cap": 0.8, "window": 11}),
    "one position": ((2, 1, 1, 4), {"block_size": 8}),
    "a block longer than the sequence": ((2, 1, 11, 4), {"block_size": 64, "window": 4}),
    "a partial block, wide values, grouped heads": ((4, 2, 21, 4, 10), {"block_size": 8}),
    "window smaller than a block, ALiBi": ((4, 1, 21, 4), {"block_size": 8, "window": 5, "slopes": 4}),
    "window of several blocks, ALiBi": ((6, 2, 29, 4, 10), {"block_size": 8, "window": 18, "slopes": 6}),
    "sinks, window, grouped heads": ((4, 2, 21, 4), {"block_size": 8, "window": 11, "sinks": SINKS}),
    "upcast": ((4, 2, 21, 4), {"block_size": 8, "window": 11, "slopes": 4, "upcast": True}),
}
LONG = {
    "one block": ((2, 2, 16, 4), {"block_size": 16}),
    "no block size": ((2, 2, 20, 4), {"slopes": 2}),
    "full blocks, grouped heads": ((4, 2, 24, 4), {"block_size": 8}),
    "one key head, ALiBi, no packing": ((4, 1, 24, 4), {"block_size": 8, "slopes": 4, "ends": None}),
    "a partial block": ((4, 4, 21, 4), {"block_size": 8}),
    "window of one": ((2, 1, 20, 4), {"block_size": 8, "window": 1}),
    "window of a block, wide values": ((2, 2, 24, 4, 10), {"block_size": 8, "window": 8}),
    "window of a block plus one": ((2, 2, 24, 4), {"block_size": 8, "window": 9, "ends": None}),
    "window of the sequence": ((4, 2, 20, 4), {"block_size": 8, "window": 20}),
    "window longer than the sequence": ((4, 4, 21, 4), {"block_size": 8, "window": 50, "slopes": 4}),
}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *(pytest.param(*case, id=name) for name, case in SUITE.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_outputs_and_gradients_are_those_of_plain_attention(sizes, options):
    options = {"ends": ENDS, **options}
    if "slopes" in options:
        options["slopes"] = alibi_slopes(options["slopes"], 8.0)
    assert_plain("blockwise", arrays(*sizes), rtol=1e-5, atol=1e-5, scale=0.7, **options)


def test_bfloat16_stays_bfloat16_and_upcast_is_more_exact():
    errors = []
    q, k, v, d = arrays(4, 2, 40, 4)
    half = [jnp.asarray(array, jnp.bfloat16) for array in (3 * q, 3 * k, v, d)]
    for upcast in (False, True):
        options = {"scale": 0.7, "ends": ENDS, "window": 25, "slopes": alibi_slopes(4, 8.0), "upcast": upcast}
        computed = run("blockwise", half, block_size=8, **options)
        exact = run("xla", [np.asarray(array, np.float32) for array in half], **options)
        for name, value in computed.items():
            assert value.dtype == jnp.bfloat16, name
            error = np.abs(np.asarray(value, np.float32) - exact[name])
            assert error.max() < 0.03 * np.abs(exact[name]).max(), name
        errors.append(np.abs(np.asarray(computed["mixed"], np.float32) - exact["mixed"]).mean())
    assert errors[1] < 0.8 * errors[0]


def test_huge_scores_give_finite_outputs_and_gradients():
    q, k, v, d = arrays(2, 1, 20, 4)
    inputs = [1e4 * q, 1e4 * k, v, d]
    assert all(np.isfinite(value).all() for value in run("blockwise", inputs, ends=ENDS, block_size=8).values())
    # one key has all the weight; gradients of queries and keys are 1e4 times a rounding error
    assert_plain("blockwise", inputs, rtol=1e-5, atol=1e-2, scale=0.7, ends=ENDS, block_size=8)


def temporary_bytes(backend: str, length: int) -> int:
    """Bytes of temporary buffers of the forward and backward pass."""
    q, k = (jax.ShapeDtypeStruct((1, heads, length, 8), jnp.float32) for heads in (2, 1))

    def loss(q, k, v):
        return (self_attend(backend, q, k, v, 0.5, block_size=16) ** 2).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_and_that_of_plain_attention_quadratically():
    growth = {name: temporary_bytes(name, 1024) / temporary_bytes(name, 512) for name in ("blockwise", "xla")}
    assert growth["blockwise"] == pytest.approx(2, rel=0.05)
    assert growth["xla"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("window", [None, 1, 4, 5])
def test_blocks_are_computed_if_and_only_if_a_query_sees_one_of_their_keys(window):
    """Zero weights times NaN are NaN, which shows all pairs of blocks that are multiplied, masked or not."""
    block, blocks = 4, 5
    length = block * blocks
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= 0) & (apart < (window or length))
    expected = seen.reshape(blocks, block, blocks, block).any(axis=(1, 3))  # [blocks of queries, blocks of keys]

    inputs = np.random.default_rng(0).normal(size=(blocks, 1, length, 4)).astype(np.float32)
    bad = inputs.copy()
    for n in range(blocks):
        bad[n, :, n * block : (n + 1) * block] = np.nan  # in sequence n of the batch, block n

    def attend(q, k, v):
        return self_attend("blockwise", q, k, v, 0.5, window=window, block_size=block)

    def poisoned(array) -> np.ndarray:
        return np.isnan(np.asarray(array)).reshape(blocks, blocks, -1).any(-1)  # [sequence, block]

    @jax.jit
    def both(bad):
        _, dk, dv = jax.vjp(attend, inputs, inputs, inputs)[1](bad)
        return attend(inputs, inputs, bad), dk, dv

    forward, dk, dv = both(bad)
    np.testing.assert_array_equal(poisoned(forward).T, expected)
    np.testing.assert_array_equal(poisoned(dk), expected)
    np.testing.assert_array_equal(poisoned(dv), expected)
