"""The bound on speed."""

import pytest
from hlo.programs import GPU_LOOP

from lmtrain.compiled.collectives import Network
from lmtrain.compiled.figures import bound, measure
from lmtrain.runtime.accelerators import ACCELERATORS


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
