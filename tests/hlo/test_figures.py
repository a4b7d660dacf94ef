"""Figures of compiled programs: FLOPs, trip counts of loops, traffic, source lines, and the bound on speed."""

import jax
import jax.numpy as jnp
import pytest
from hlo.programs import ALONE, CONVERTED, EIGHT, FOUR, GPU_LOOP, NESTED_LOOPS, SLICES, TPU, count_flops

from lmtrain.compiled.collectives import Network
from lmtrain.compiled.executions import RARELY
from lmtrain.compiled.figures import bound, measure
from lmtrain.runtime.accelerators import ACCELERATORS


def test_a_gpu_loop_with_a_gemm_call_and_gathers():
    found = measure(GPU_LOOP, EIGHT)
    assert found.flops == 7 * (2 * 32 * 32 * 8)
    assert [(one.kind, one.devices, one.times, one.bytes, one.asynchronous) for one in found.collectives] == [
        ("all-gather", 8, 7, 32 * 8 * 2, True),
        ("all-gather", 8, 7, 32 * 8 * 2, False),
    ]
    assert found.wire_bytes == 2 * 7 * (7 / 8 * 32 * 8 * 2)
    assert {one.axes for one in found.collectives} == {("data",)}
    assert [(kernel.target, kernel.times) for kernel in found.kernels] == [("my_kernel", 7)]


def test_a_batched_product_written_as_a_convolution_counts_positions_inside_only():
    """Three products of [8, 16] and [16, 8]: 3 of the window's 9 positions hit no hole or padding."""
    assert measure(TPU, FOUR).flops == 3 * (2 * 8 * 8 * 16)


def test_an_asynchronous_collective_counts_where_it_starts_and_ends():
    """Not in the fusion of the product that overlaps with it, although its arrays pass through that."""
    start, during, end, scattered = 2 * 4 * 8 * 2, 4 * 3 * (2 * 8 * 16 + 8 * 8), 16 * 8 * 2, 4 * 64 * (16 + 4)
    assert measure(TPU, FOUR).hbm_bytes == start + during + end + scattered
    passed = TPU.replace("ROOT %batched =", "%batched =").replace(
        "lhs_dilate=3}, dim_labels=0bf_0io->0bf\n",
        "lhs_dilate=3}, dim_labels=0bf_0io->0bf\n"
        "  ROOT %all = (f32[3,8,8]{2,1,0}, bf16[4,8]{1,0}, bf16[16,8]{1,0}) tuple(%batched, %w, %all-gather.2)\n",
    ).replace(
        "%during = f32[3,8,8]{2,1,0:T(8,128)} fusion",
        "%during = (f32[3,8,8]{2,1,0}, bf16[4,8]{1,0}, bf16[16,8]{1,0}) fusion",
    )  # fmt: skip
    assert passed != TPU
    assert measure(passed, FOUR).hbm_bytes == measure(TPU, FOUR).hbm_bytes


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 64, 128), (3, 32, 128)]),
        (lambda x, y: jnp.einsum("abcd,cdef->abef", x, y), [(2, 3, 16, 8), (16, 8, 4, 32)]),
        (
            lambda x, y: jax.lax.conv_general_dilated(x, y, (2, 1), ((1, 1), (0, 2)), (2, 3), (1, 2)),
            [(2, 8, 12, 12), (16, 8, 3, 3)],
        ),
    ],
    ids=["batched", "two dimensions", "dilated convolution"],
)
def test_without_loops_flops_equal_xlas_count(function, shapes):
    ours, theirs = count_flops(function, *shapes)
    assert ours == theirs > 0


def test_trip_counts_of_nested_loops_multiply():
    """The outer loop counts 1, 3, 5, 7 up to a loop-invariant bound; the inner one 0 to 4."""
    found = measure(NESTED_LOOPS, ALONE)
    assert found.flops == 4 * 5 * (2 * 8 * 16 * 16)
    assert [(loop.times, loop.total, loop.is_known) for loop in found.loops] == [(4, 4, True), (5, 20, True)]
    # the innermost lines of the package
    assert [product.where for product in found.products] == ["models/layers/linear.py:56"]
    assert found.loops[0].where == "models/gpt2/model.py:154"


def test_a_loop_with_a_computed_bound_is_marked_and_its_trip_count_can_be_given():
    text = NESTED_LOOPS.replace("%five = s32[] constant(5)", "%five = s32[] get-tuple-element(%p), index=0")
    found = measure(text, ALONE)
    assert [loop.is_known for loop in found.loops] == [True, False]
    assert measure(text, ALONE, lambda op_name: 2.5).flops == 4 * 2.5 * (2 * 8 * 16 * 16)


def test_a_branch_that_hardly_ever_runs_does_not_count():
    def program(scope):
        def seldom(x):
            with jax.named_scope(scope):
                return x @ x @ x

        return lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, seldom, x)

    # two sizes: the compilation cache ignores scopes
    assert count_flops(program(RARELY), (16, 16))[0] == 2 * 16**3
    assert count_flops(program("often"), (8, 8))[0] == 3 * 2 * 8**3


def test_slices_of_large_arrays_are_not_counted_in_full():
    """One slice is read and written, then read for the copy; the update reads on-chip memory and writes one row."""
    index = 4
    assert measure(SLICES, ALONE).hbm_bytes == (256 + index + 256) + 256 + (index + 256)


def test_converted_arrays_count_in_full_unless_only_gathered_from():
    assert measure(CONVERTED, ALONE).hbm_bytes == (8 * 4 + 8 * 4 + 8 * 4) + (8 * 512) * (2 + 4)


def test_the_bound_hides_asynchronous_communication_and_nothing_else():
    h100 = ACCELERATORS["h100"]
    found = measure(GPU_LOOP, Network(mesh={"data": 8}, slice_ids=[0] * 8, fast="NVLink", slow="DCN"))
    half = found.wire_bytes / 2 / h100.link_bandwidth
    seconds = bound(989e12, 0.5 * h100.memory_bandwidth, found.collectives, h100)
    assert (seconds["products"], seconds["hbm"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert seconds["wire_synchronous"] == pytest.approx(half)
    assert seconds["total"] == pytest.approx(1.0 + half)
    assert seconds["limited_by"] == "products"


def test_products_in_8_bits_have_the_rate_of_their_format():
    h100, v5e = ACCELERATORS["h100"], ACCELERATORS["v5e"]
    assert bound(2 * 989e12, 0.0, [], h100, 989e12, "fp8")["products"] == pytest.approx(1.5, rel=1e-3)
    assert bound(197e12, 0.0, [], v5e, 197e12, "int8")["products"] == pytest.approx(0.5)
    assert bound(989e12, 0.0, [], h100, 0.0, None)["products"] == pytest.approx(1.0)


def test_the_least_traffic_is_that_of_products_kernels_and_collectives():
    """Products [32, 8] x [8, 32] in bfloat16, whose result may be on chip; kernels and gathers as compiled."""
    found = measure(GPU_LOOP, EIGHT)
    hidden = measure(GPU_LOOP, EIGHT, on_chip=lambda where, shape: shape.dims == (32, 32))
    times = 7
    assert sum(found.least.values()) - sum(hidden.least.values()) == times * 32 * 32 * 2
    assert 0 < sum(hidden.least.values()) < sum(found.least.values()) <= found.hbm_bytes


FUSED_PRODUCT = """
HloModule fused, is_scheduled=true

%inside (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[16,4]{1,0} parameter(1)
  ROOT %product = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0:S(1)} parameter(0)
  %y = f32[16,4]{1,0} parameter(1)
  ROOT %fused = f32[8,4]{1,0} fusion(%x, %y), kind=kOutput, calls=%inside
}
"""


def test_arrays_that_are_on_chip_outside_of_a_fusion_are_not_part_of_the_least_traffic():
    assert sum(measure(FUSED_PRODUCT, ALONE).least.values()) == 4 * (16 * 4 + 8 * 4)
