"""The minimum time of a program on a device, with each resource at its peak rate: the roofline model.

Products, memory traffic and asynchronous communication can overlap; synchronous communication cannot:
seconds = max(products, HBM, asynchronous wire) + synchronous wire (Williams et al. 2009).
"""

from collections.abc import Sequence
from typing import Any

from lmtrain.compiled.collectives import Collective
from lmtrain.runtime.accelerators import Accelerator


def bound(
    flops: float, hbm_bytes: float, collectives: Sequence[Collective], accelerator: Accelerator
) -> dict[str, Any]:
    """Seconds of each resource, `total`, and `limited_by`, the limiting resource: products, hbm or wire.

    Between islands, each device has an equal share of the slow network, and the devices of one island split the bytes
    of a collective, as in hierarchical algorithms.
    """
    asynchronous = sum(_seconds(one, accelerator) for one in collectives if one.asynchronous)
    synchronous = sum(_seconds(one, accelerator) for one in collectives if not one.asynchronous)
    products = flops / accelerator.peak_flops
    hbm = hbm_bytes / accelerator.memory_bandwidth
    total = max(products, hbm, asynchronous) + synchronous
    wire = asynchronous + synchronous
    rates = {"products": products, "hbm": hbm, "wire": wire}
    return rates | {
        "wire_synchronous": synchronous,
        "total": total,
        "limited_by": max(rates, key=lambda name: rates[name]),
    }


def _seconds(one: Collective, accelerator: Accelerator) -> float:
    if one.network == accelerator.link:
        return one.wire_bytes / accelerator.link_bandwidth
    return one.wire_bytes / one.per_island / accelerator.dcn_bandwidth
