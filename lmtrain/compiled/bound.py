"""The minimum time of a program on a device, with each resource at its peak rate: the roofline model.

Products, memory traffic and asynchronous communication can overlap; synchronous communication cannot:
seconds = max(products, HBM, asynchronous wire) + synchronous wire (Williams et al. 2009).
"""

from collections.abc import Sequence
from typing import Any

from lmtrain.compiled.collectives import Collective
from lmtrain.runtime.accelerators import Accelerator


def bound(
    flops: float,
    hbm_bytes: float,
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    eight_bit: float = 0.0,
    products: str | None = None,
) -> dict[str, Any]:
    """Seconds of each resource, `total`, and `limited_by`, the limiting resource: products, hbm or wire.

    `eight_bit` of the FLOPs are of products in the format `products`.

    Between slices, each device has an equal share of the slow network, and the devices of one slice split the bytes
    of a collective, as in hierarchical algorithms.
    """
    asynchronous = sum(_seconds(collective, accelerator) for collective in collectives if collective.asynchronous)
    synchronous = sum(_seconds(collective, accelerator) for collective in collectives if not collective.asynchronous)
    peak = accelerator.peak_flops
    of_products = (flops - eight_bit) / peak + eight_bit / accelerator.eight_bit.get(products or "", peak)
    hbm = hbm_bytes / accelerator.memory_bandwidth
    total = max(of_products, hbm, asynchronous) + synchronous
    wire = asynchronous + synchronous
    rates = {"products": of_products, "hbm": hbm, "wire": wire}
    return rates | {
        "wire_synchronous": synchronous,
        "total": total,
        "limited_by": max(rates, key=lambda name: rates[name]),
    }


def _seconds(collective: Collective, accelerator: Accelerator) -> float:
    if collective.network == accelerator.link:
        return collective.wire_bytes / accelerator.link_bandwidth
    return collective.wire_bytes / collective.per_slice / accelerator.dcn_bandwidth
