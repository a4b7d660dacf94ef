"""Communication and groups of devices, in programs whose figures are known by hand."""

import pytest
from hlo.programs import FOUR, GPU_LOOP, SLICES_OF_TPUS, TPU

from lmtrain.compiled.collectives import Network, mesh_axes, parse_groups
from lmtrain.compiled.figures import bound, measure
from lmtrain.runtime.accelerators import ACCELERATORS


def test_a_tpu_reduce_scatter_is_one_and_an_asynchronous_collective_counts_once():
    found = measure(TPU, FOUR)
    kinds = {one.kind: one for one in found.collectives}
    assert sorted(kinds) == ["all-gather", "reduce-scatter"]
    assert len(found.collectives) == 2
    assert kinds["reduce-scatter"].wire_bytes == 3 / 4 * 64 * 16 * 4
    assert not kinds["reduce-scatter"].asynchronous
    assert kinds["all-gather"].wire_bytes == 3 / 4 * 16 * 8 * 2
    assert kinds["all-gather"].asynchronous


def test_a_group_over_two_slices_uses_the_slow_network_and_shares_it():
    found = measure(GPU_LOOP, Network(mesh={"data": 8}, slice_ids=[0, 0, 0, 0, 1, 1, 1, 1], fast="NVLink", slow="DCN"))
    assert {(one.network, one.per_slice) for one in found.collectives} == {("DCN", 4)}
    h100 = ACCELERATORS["h100"]
    seconds = bound(0.0, 0.0, found.collectives, h100)
    assert seconds["wire"] == pytest.approx(found.wire_bytes / 4 / h100.dcn_bandwidth)
    assert seconds["total"] == seconds["wire"]


def test_transfers_between_slices_of_tpus_are_collectives_over_the_slow_network():
    found = measure(SLICES_OF_TPUS, Network(mesh={"replica": 2, "data": 2}, slice_ids=[0, 0, 1, 1]))
    within, across = found.collectives
    assert (within.kind, within.network, within.axes) == ("all-reduce", "ICI", ("data",))
    assert (across.kind, across.network, across.axes, across.devices) == ("all-reduce", "DCN", ("replica",), 2)
    assert within.wire_bytes == across.wire_bytes == 2 * 1 / 2 * 64 * 16 * 4
    assert across.asynchronous


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("source_target_pairs={{0,1},{1,2},{2,0},{3,4}}, x", [[0, 1, 2], [3, 4]]),
    ],
)
def test_all_forms_of_groups_are_parsed(attributes, groups):
    assert sorted(parse_groups(attributes, 8)) == groups
    with pytest.raises(ValueError, match="replica_groups=new"):
        parse_groups("channel_id=1, replica_groups=new(8), x", 8)


def test_groups_are_mapped_to_axes_of_the_mesh():
    mesh = {"replica": 2, "data": 4, "model": 2}
    assert mesh_axes([0, 1], mesh) == ("model",)
    assert mesh_axes([0, 2, 4, 6], mesh) == ("data",)
    assert mesh_axes(list(range(16)), mesh) == ("replica", "data", "model")
    assert mesh_axes([0, 16], mesh) == ()
