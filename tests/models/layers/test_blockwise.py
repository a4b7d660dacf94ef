"""Blockwise attention against the plain backend; its memory, and the blocks that it skips."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.attention import alibi_slopes, self_attend

# Ends of documents in the two sequences of a batch: within blocks, at their ends, and at different positions.
ENDS = np.array([[3, 8, 19], [1, 7, 15]])


class Case(NamedTuple):
    heads: int
    kv_heads: int
    length: int
    block: int | None
    window: int | None = None
    alibi: bool = False
    value_dim: int = 4
    packed: bool = True
    upcast: bool = False

    def arrays(self, spread: float = 1.0) -> list[np.ndarray]:
        """Queries, keys, values, and the gradient of the output."""
        rng = np.random.default_rng(self.length)
        dims = [(self.heads, 4), (self.kv_heads, 4), (self.kv_heads, self.value_dim), (self.heads, self.value_dim)]
        q, k, v, d = (rng.normal(size=(2, heads, self.length, dim)).astype(np.float32) for heads, dim in dims)
        return [q * spread, k * spread, v, d]

    def run(self, backend: str, arrays, scale: float = 0.7):
        """The output, and the gradients of queries, keys and values."""
        segments = (np.arange(self.length) >= ENDS[..., None]).sum(1)

        def attend(q, k, v):
            return self_attend(
                backend,
                q,
                k,
                v,
                scale,
                upcast=self.upcast,
                segments_BS=jnp.asarray(segments) if self.packed else None,
                window=self.window,
                slopes=alibi_slopes(self.heads, 8.0) if self.alibi else None,
                block_size=self.block,
            )

        def both(q, k, v, d):
            mixed, pull = jax.vjp(attend, q, k, v)
            return {"mixed": mixed} | dict(zip(["dq", "dk", "dv"], pull(d), strict=True))

        return jax.jit(both)(*arrays)


CASES = {
    "one block": Case(2, 2, 16, 16),
    "one position": Case(2, 1, 1, 8),
    "a block longer than the sequence": Case(2, 1, 11, 64, window=4),
    "no block size": Case(2, 2, 20, None, alibi=True),
    "full blocks, grouped heads": Case(4, 2, 24, 8),
    "one key head, ALiBi, no packing": Case(4, 1, 24, 8, alibi=True, packed=False),
    "a partial block": Case(4, 4, 21, 8),
    "a partial block, wide values, grouped heads": Case(4, 2, 21, 8, value_dim=10),
    "window of one": Case(2, 1, 20, 8, window=1),
    "window smaller than a block, ALiBi": Case(4, 1, 21, 8, window=5, alibi=True),
    "window of a block, wide values": Case(2, 2, 24, 8, window=8, value_dim=10),
    "window of a block plus one": Case(2, 2, 24, 8, window=9, packed=False),
    "window of several blocks, grouped heads, ALiBi": Case(6, 2, 29, 8, window=18, alibi=True, value_dim=10),
    "window of the sequence": Case(4, 2, 20, 8, window=20),
    "window longer than the sequence": Case(4, 4, 21, 8, window=50, alibi=True),
    "upcast": Case(4, 2, 21, 8, window=11, alibi=True, upcast=True),
}


SUITE = {
    *("one position", "a block longer than the sequence", "a partial block, wide values, grouped heads"),
    *("window smaller than a block, ALiBi", "window of several blocks, grouped heads, ALiBi", "upcast"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name, marks=() if name in SUITE else pytest.mark.long) for name in CASES]
)
def test_outputs_and_gradients_are_those_of_plain_attention(case):
    arrays = case.arrays()
    found, expected = case.run("blockwise", arrays), case.run("xla", arrays)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_bfloat16_stays_bfloat16_and_upcast_is_more_exact():
    errors = []
    for upcast in (False, True):
        case = Case(4, 2, 40, 8, window=25, alibi=True, upcast=upcast)
        half = [jnp.asarray(array, jnp.bfloat16) for array in case.arrays(spread=3.0)]
        found, exact = case.run("blockwise", half), case.run("xla", [np.asarray(array, np.float32) for array in half])
        for name, value in found.items():
            assert value.dtype == jnp.bfloat16, name
            error = np.abs(np.asarray(value, np.float32) - exact[name])
            assert error.max() < 0.03 * np.abs(exact[name]).max(), name
        errors.append(np.abs(np.asarray(found["mixed"], np.float32) - exact["mixed"]).mean())
    assert errors[1] < 0.8 * errors[0]


def test_huge_scores_give_finite_outputs_and_gradients():
    case = Case(2, 1, 20, 8)
    arrays = case.arrays(spread=1e4)
    found, expected = case.run("blockwise", arrays), case.run("xla", arrays)
    for name, value in found.items():
        assert np.isfinite(value).all(), name
        # one key has all the weight; gradients of queries and keys are 1e4 times a rounding error
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-2, err_msg=name)


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


@pytest.mark.parametrize("window", [None, 1, 4, 5, 6])
def test_blocks_are_computed_if_and_only_if_a_query_sees_one_of_their_keys(window):
    """Zero weights times NaN are NaN, which shows all pairs of blocks that are multiplied, masked or not."""
    block, blocks = 4, 5
    length = block * blocks
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= 0) & (apart < (window or length))
    wanted = seen.reshape(blocks, block, blocks, block).any(axis=(1, 3))  # [blocks of queries, blocks of keys]

    whole = np.random.default_rng(0).normal(size=(blocks, 1, length, 4)).astype(np.float32)
    bad = whole.copy()
    for n in range(blocks):
        bad[n, :, n * block : (n + 1) * block] = np.nan  # in sequence n of the batch, block n

    def attend(q, k, v):
        return self_attend("blockwise", q, k, v, 0.5, window=window, block_size=block)

    def poisoned(array) -> np.ndarray:
        return np.isnan(np.asarray(array)).reshape(blocks, blocks, -1).any(-1)  # [sequence, block]

    @jax.jit
    def both(bad):
        _, dk, dv = jax.vjp(attend, whole, whole, whole)[1](bad)
        return attend(whole, whole, bad), dk, dv

    forward, dk, dv = both(bad)
    np.testing.assert_array_equal(poisoned(forward).T, wanted)
    np.testing.assert_array_equal(poisoned(dk), wanted)
    np.testing.assert_array_equal(poisoned(dv), wanted)
