"""Trip counts of loops."""

import jax
import jax.numpy as jnp
from hlo.programs import ALONE, NESTED_LOOPS, count_flops

from lmtrain.compiled.figures import measure


def test_trip_counts_of_nested_loops_multiply():
    """The outer loop counts 1, 3, 5, 7 up to a loop-invariant bound; the inner one 0 to 4."""
    found = measure(NESTED_LOOPS, ALONE)
    assert found.flops == 4 * 5 * (2 * 8 * 16 * 16)
    assert [(loop.times, loop.total, loop.is_known) for loop in found.loops] == [(4, 4, True), (5, 20, True)]


def test_a_loop_with_a_computed_bound_is_marked_and_its_trip_count_can_be_given():
    text = NESTED_LOOPS.replace("%five = s32[] constant(5)", "%five = s32[] get-tuple-element(%p), index=0")
    found = measure(text, ALONE)
    assert [loop.is_known for loop in found.loops] == [True, False]
    assert measure(text, ALONE, lambda op_name: 2.5).flops == 4 * 2.5 * (2 * 8 * 16 * 16)


def test_a_scan_multiplies_flops_where_xlas_count_does_not():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=11)[0]

    ours, _ = count_flops(function, (64, 128), (128, 128))
    assert ours == 11 * 2 * 64 * 128 * 128
