"""Figures of lmtrain/compiled for programs whose figures are known by hand."""

import jax
import jax.numpy as jnp
import pytest
from hlo.programs import GPU_LOOP, NESTED_LOOPS, SLICES, SLICES_OF_TPUS, TPU

from lmtrain.compiled.bound import bound
from lmtrain.compiled.collectives import Network
from lmtrain.compiled.figures import measure
from lmtrain.compiled.groups import mesh_axes, parse_groups
from lmtrain.compiled.hlo import parse_hlo
from lmtrain.compiled.shapes import Shape, parse_shapes
from lmtrain.runtime.accelerators import ACCELERATORS

ALONE = Network({"data": 1}, [0])
EIGHT = Network({"replica": 1, "data": 8, "model": 1}, [0] * 8)
FOUR = Network({"replica": 1, "data": 4, "model": 1}, [0] * 4)


def test_shapes_have_sizes_types_and_memory_spaces():
    assert parse_shapes("(bf16[12,768]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0}, f32[], pred[2,<=4])") == [
        Shape("bf16", (12, 768), 1),
        Shape("s4", (3,)),
        Shape("f32", ()),
        Shape("pred", (2, 4)),
    ]
    assert [Shape(kind, (6,)).bytes for kind in ("bf16", "s4", "f32", "pred", "f8e4m3fn", "c64")] == [
        12,
        3,
        24,
        6,
        6,
        48,
    ]
    assert Shape("f32", (6,), 1).hbm_bytes == 0


def test_text_without_an_entry_computation_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule nothing\n")


def test_trip_counts_of_nested_loops_multiply():
    """The outer loop counts 1, 3, 5, 7 up to a loop-invariant bound; the inner one 0 to 4."""
    found = measure(NESTED_LOOPS, ALONE)
    assert found.flops == 4 * 5 * (2 * 8 * 16 * 16)
    assert [(loop.times, loop.total, loop.is_known) for loop in found.loops] == [(4, 4, True), (5, 20, True)]


def test_places_are_the_innermost_lines_of_the_package():
    found = measure(NESTED_LOOPS, ALONE)
    assert [product.where for product in found.products] == ["models/layers/linear.py:56"]
    assert found.loop_places[0] == "models/gpt2/model.py:154"


def test_a_loop_with_a_computed_bound_is_marked_and_its_trip_count_can_be_given():
    text = NESTED_LOOPS.replace("%five = s32[] constant(5)", "%five = s32[] get-tuple-element(%p), index=0")
    found = measure(text, ALONE)
    assert [loop.is_known for loop in found.loops] == [True, False]
    assert measure(text, ALONE, lambda stack: 2.5).flops == 4 * 2.5 * (2 * 8 * 16 * 16)


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


def test_a_tpu_reduce_scatter_is_one_and_an_asynchronous_collective_counts_once():
    found = measure(TPU, FOUR)
    kinds = {one.kind: one for one in found.collectives}
    assert sorted(kinds) == ["all-gather", "reduce-scatter"]
    assert len(found.collectives) == 2
    assert kinds["reduce-scatter"].wire_bytes == 3 / 4 * 64 * 16 * 4
    assert not kinds["reduce-scatter"].asynchronous
    assert kinds["all-gather"].wire_bytes == 3 / 4 * 16 * 8 * 2
    assert kinds["all-gather"].asynchronous


def test_a_batched_product_written_as_a_convolution_counts_positions_inside_only():
    """Three products of [8, 16] and [16, 8]: 3 of the window's 9 positions hit no hole or padding."""
    assert measure(TPU, FOUR).flops == 3 * (2 * 8 * 8 * 16)


def test_slices_of_large_arrays_are_not_counted_in_full():
    """One slice is read and written, then read for the copy; the update reads on-chip memory and writes one row."""
    index = 4
    assert measure(SLICES, ALONE).hbm_bytes == (256 + index + 256) + 256 + (index + 256)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("source_target_pairs={{0,1},{1,2},{2,0},{3,4}}, x", [[0, 1, 2], [3, 4]]),
    ],
)
def test_all_forms_of_groups_are_parsed(attributes, groups):
    assert sorted(parse_groups(attributes, 8)) == groups


def test_an_unknown_form_of_groups_is_an_error():
    with pytest.raises(ValueError, match="unknown form of replica groups: replica_groups=new"):
        parse_groups("channel_id=1, replica_groups=new(8), x", 8)


def test_groups_are_mapped_to_axes_of_the_mesh():
    mesh = {"replica": 2, "data": 4, "model": 2}
    assert mesh_axes([0, 1], mesh) == ("model",)
    assert mesh_axes([0, 2, 4, 6], mesh) == ("data",)
    assert mesh_axes(list(range(16)), mesh) == ("replica", "data", "model")
    assert mesh_axes([0, 16], mesh) == ()


def test_a_group_over_two_islands_uses_the_slow_network_and_shares_it():
    found = measure(GPU_LOOP, Network({"data": 8}, [0, 0, 0, 0, 1, 1, 1, 1], "NVLink", "DCN"))
    assert {(one.network, one.per_island) for one in found.collectives} == {("DCN", 4)}
    h100 = ACCELERATORS["h100"]
    seconds = bound(0.0, 0.0, found.collectives, h100)
    assert seconds["wire"] == pytest.approx(found.wire_bytes / 4 / h100.dcn_bandwidth)
    assert seconds["total"] == seconds["wire"]


def test_transfers_between_slices_of_tpus_are_collectives_over_the_slow_network():
    found = measure(SLICES_OF_TPUS, Network({"replica": 2, "data": 2}, [0, 0, 1, 1]))
    within, across = found.collectives
    assert (within.kind, within.network, within.axes) == ("all-reduce", "ICI", ("data",))
    assert (across.kind, across.network, across.axes, across.devices) == ("all-reduce", "DCN", ("replica",), 2)
    assert within.wire_bytes == across.wire_bytes == 2 * 1 / 2 * 64 * 16 * 4
    assert across.asynchronous


def test_the_bound_hides_asynchronous_communication_and_nothing_else():
    h100 = ACCELERATORS["h100"]
    found = measure(GPU_LOOP, Network({"data": 8}, [0] * 8, "NVLink", "DCN"))
    half = found.wire_bytes / 2 / h100.link_bandwidth
    seconds = bound(989e12, 0.5 * h100.memory_bandwidth, found.collectives, h100)
    assert (seconds["products"], seconds["hbm"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert seconds["wire_synchronous"] == pytest.approx(half)
    assert seconds["total"] == pytest.approx(1.0 + half)
    assert seconds["limited_by"] == "products"


def _products(function, *shapes):
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    return measure(compiled.as_text(), ALONE).flops, compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x @ y, [(64, 128), (128, 256)]),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 64, 128), (3, 32, 128)]),
        (lambda x, y: jnp.einsum("abcd,cdef->abef", x, y), [(2, 3, 16, 8), (16, 8, 4, 32)]),
        (
            lambda x, y: jax.lax.conv_general_dilated(x, y, (2, 1), ((1, 1), (0, 2)), feature_group_count=2),
            [(2, 8, 16, 16), (32, 4, 3, 5)],
        ),
        (
            lambda x, y: jax.lax.conv_general_dilated(x, y, (1, 1), ((2, 2), (2, 2)), (2, 3), (1, 2)),
            [(2, 8, 12, 12), (16, 8, 3, 3)],
        ),
    ],
    ids=["matrix", "batched", "two dimensions", "convolution", "dilated convolution"],
)
def test_without_loops_flops_equal_xlas_count(function, shapes):
    ours, theirs = _products(function, *shapes)
    assert ours == theirs > 0


def test_a_scan_multiplies_flops_where_xlas_count_does_not():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=11)[0]

    ours, _ = _products(function, (64, 128), (128, 128))
    assert ours == 11 * 2 * 64 * 128 * 128
