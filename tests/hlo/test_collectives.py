"""Communication, in programs whose figures are known by hand."""

import pytest
from hlo.programs import FOUR, GPU_LOOP, SLICES_OF_TPUS, TPU

from lmtrain.compiled.collectives import Network
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
