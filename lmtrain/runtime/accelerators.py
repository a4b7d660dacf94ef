"""Table of accelerators by kind and by JAX's device name: peak FLOP/s, memory and links. Does not import JAX.

Figures are the vendors' published ones: peak FLOP/s of dense matrix products, and bandwidths of one device in one
direction. Sources: NVIDIA's data sheets of A100, A10, L4, L40, L40S, H100, H200, GH200, DGX B200 and GB200; Google
Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e". The bandwidth of a TPU chip is the sum over its links, half of
the published bidirectional figure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """A kind of device. `peak_flops` in FLOP/s of 16-bit products, bandwidths in bytes/s, `memory` in bytes;
    `eight_bit`: FLOP/s of products of each 8-bit format that are faster.

    `link` connects the `host_devices` of one host (GPU) or all chips of a slice (TPU); the data center network (DCN)
    connects hosts and slices.
    """

    kind: str
    name: str
    platform: str
    peak_flops: float
    memory: int
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    dcn_bandwidth: float
    host_devices: int
    eight_bit: Mapping[str, float] = field(default_factory=dict)


_PCIE4, _PCIE5 = ("PCIe", 32e9), ("PCIe", 64e9)
_NVLINK3, _NVLINK4, _NVLINK5 = ("NVLink", 300e9), ("NVLink", 450e9), ("NVLink", 900e9)
_BRIDGE = ("NVLink", 300e9)


def _both(flops: float) -> dict[str, float]:
    return {"fp8": flops, "int8": flops}


# Network per GPU: 400 Gbit/s in DGX H100, H200 and B200, 200 in DGX A100, 100 assumed for PCIe cards.
ACCELERATORS = {
    accelerator.kind: accelerator
    for accelerator in (
        Accelerator("v4", "TPU v4", "tpu", 275e12, 32 * _GIB, 1228e9, "ICI", 300e9, 6.25e9, 4),
        Accelerator("v5e", "TPU v5e", "tpu", 197e12, 16 * _GIB, 819e9, "ICI", 200e9, 3.125e9, 4, {"int8": 394e12}),
        Accelerator("v5p", "TPU v5p", "tpu", 459e12, 95 * _GIB, 2765e9, "ICI", 600e9, 6.25e9, 4, {"int8": 918e12}),
        Accelerator("v6e", "TPU v6e", "tpu", 918e12, 32 * _GIB, 1638e9, "ICI", 400e9, 12.5e9, 4, {"int8": 1836e12}),
        Accelerator(
            "a100-40gb", "NVIDIA A100 40GB", "gpu", 312e12, 40 * _GIB, 1555e9, *_NVLINK3, 25e9, 8, {"int8": 624e12}
        ),
        Accelerator("a100", "NVIDIA A100 80GB", "gpu", 312e12, 80 * _GIB, 2039e9, *_NVLINK3, 25e9, 8, {"int8": 624e12}),
        Accelerator("h100", "NVIDIA H100", "gpu", 989e12, 80 * _GIB, 3352e9, *_NVLINK4, 50e9, 8, _both(1979e12)),
        Accelerator(
            "h100-nvl", "NVIDIA H100 NVL", "gpu", 835e12, 94 * 10**9, 3938e9, *_BRIDGE, 50e9, 8, _both(1671e12)
        ),
        Accelerator(
            "h100-pcie", "NVIDIA H100 PCIe", "gpu", 756e12, 80 * _GIB, 2039e9, *_PCIE5, 25e9, 8, _both(1513e12)
        ),
        Accelerator("h200", "NVIDIA H200", "gpu", 989e12, 141 * 10**9, 4800e9, *_NVLINK4, 50e9, 8, _both(1979e12)),
        Accelerator("gh200", "NVIDIA GH200", "gpu", 989e12, 96 * 10**9, 4000e9, *_NVLINK4, 50e9, 1, _both(1979e12)),
        Accelerator("b200", "NVIDIA B200", "gpu", 2.25e15, 180 * 10**9, 8000e9, *_NVLINK5, 50e9, 8, _both(4.5e15)),
        Accelerator("gb200", "NVIDIA GB200", "gpu", 2.5e15, 186 * 10**9, 8000e9, *_NVLINK5, 50e9, 4, _both(5e15)),
        Accelerator("l4", "NVIDIA L4", "gpu", 121e12, 24 * 10**9, 300e9, *_PCIE4, 12.5e9, 8, _both(242e12)),
        Accelerator("l40", "NVIDIA L40", "gpu", 181e12, 48 * 10**9, 864e9, *_PCIE4, 12.5e9, 8, _both(362e12)),
        Accelerator("l40s", "NVIDIA L40S", "gpu", 362e12, 48 * 10**9, 864e9, *_PCIE4, 12.5e9, 8, _both(733e12)),
        Accelerator("a10", "NVIDIA A10", "gpu", 125e12, 24 * 10**9, 600e9, *_PCIE4, 12.5e9, 8, {"int8": 250e12}),
        Accelerator("a10g", "NVIDIA A10G", "gpu", 70e12, 24 * 10**9, 600e9, *_PCIE4, 12.5e9, 8, {"int8": 140e12}),
    )
}

# Formats whose products are faster on a kind of device, but not training with them, by the cycles that the compiler
# estimates (BUILD-notes.md): computing scales and converting costs most of what products save.
SLOW_FORMATS = {("v6e", "int8")}

# JAX's names of TPUs that do not have their kind, in lower case.
_TPUS = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e", "tpu v6": "v6e"}


def find_accelerator(device_kind: str) -> Accelerator | None:
    """The accelerator with this JAX device name ("NVIDIA H100 80GB HBM3", "TPU v5 lite") or kind ("h100").

    None if it is unknown. Complete words are compared: an "RTX A1000" is not an A100, a "GB200" is not a B200.
    """
    name = device_kind.lower()
    words = set(re.split(r"[^a-z0-9]+", name))
    kinds = sorted(ACCELERATORS, key=lambda kind: -len(kind))  # h100-nvl before h100
    of_words = next((kind for kind in kinds if words.issuperset(kind.split("-"))), "")
    return ACCELERATORS.get(name) or ACCELERATORS.get(_TPUS.get(name, of_words))
