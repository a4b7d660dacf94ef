"""Table of accelerators by kind and by JAX's device name: peak FLOP/s, memory and links. Does not import JAX.

Figures are the vendors' published ones: peak FLOP/s of dense 16-bit matrix products, and bandwidths of one device in
one direction. Sources: NVIDIA's data sheets of A100, A10, L4, L40, L40S, H100, H200, GH200, DGX B200 and GB200; Google
Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e". The bandwidth of a TPU chip is the sum over its links, half of
the published bidirectional figure.
"""

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

_GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """A kind of device. `peak_flops` in FLOP/s, bandwidths in bytes/s, `memory` in bytes.

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


def _gpu(
    kind: str,
    name: str,
    peak: float,
    memory: int,
    bandwidth: float,
    link: tuple[str, float],
    network: float,
    host: int = 8,
) -> Accelerator:
    return Accelerator(kind, f"NVIDIA {name}", "gpu", peak, memory, bandwidth, *link, network, host)


_PCIE4, _PCIE5 = ("PCIe", 32e9), ("PCIe", 64e9)
_NVLINK3, _NVLINK4, _NVLINK5 = ("NVLink", 300e9), ("NVLink", 450e9), ("NVLink", 900e9)

# Network per GPU: 400 Gbit/s in DGX H100, H200 and B200, 200 in DGX A100, 100 assumed for PCIe cards.
ACCELERATORS = {
    accelerator.kind: accelerator
    for accelerator in (
        Accelerator("v4", "TPU v4", "tpu", 275e12, 32 * _GIB, 1228e9, "ICI", 300e9, 6.25e9, 4),
        Accelerator("v5e", "TPU v5e", "tpu", 197e12, 16 * _GIB, 819e9, "ICI", 200e9, 3.125e9, 4),
        Accelerator("v5p", "TPU v5p", "tpu", 459e12, 95 * _GIB, 2765e9, "ICI", 600e9, 6.25e9, 4),
        Accelerator("v6e", "TPU v6e", "tpu", 918e12, 32 * _GIB, 1638e9, "ICI", 400e9, 12.5e9, 4),
        _gpu("a100-40gb", "A100 40GB", 312e12, 40 * _GIB, 1555e9, _NVLINK3, 25e9),
        _gpu("a100", "A100 80GB", 312e12, 80 * _GIB, 2039e9, _NVLINK3, 25e9),
        _gpu("h100", "H100", 989e12, 80 * _GIB, 3352e9, _NVLINK4, 50e9),
        _gpu("h100-nvl", "H100 NVL", 835e12, 94 * 10**9, 3938e9, ("NVLink", 300e9), 50e9),
        _gpu("h100-pcie", "H100 PCIe", 756e12, 80 * _GIB, 2039e9, _PCIE5, 25e9),
        _gpu("h200", "H200", 989e12, 141 * 10**9, 4800e9, _NVLINK4, 50e9),
        _gpu("gh200", "GH200", 989e12, 96 * 10**9, 4000e9, _NVLINK4, 50e9, host=1),
        _gpu("b200", "B200", 2.25e15, 180 * 10**9, 8000e9, _NVLINK5, 50e9),
        _gpu("gb200", "GB200", 2.5e15, 186 * 10**9, 8000e9, _NVLINK5, 50e9, host=4),
        _gpu("l4", "L4", 121e12, 24 * 10**9, 300e9, _PCIE4, 12.5e9),
        _gpu("l40", "L40", 181e12, 48 * 10**9, 864e9, _PCIE4, 12.5e9),
        _gpu("l40s", "L40S", 362e12, 48 * 10**9, 864e9, _PCIE4, 12.5e9),
        _gpu("a10", "A10", 125e12, 24 * 10**9, 600e9, _PCIE4, 12.5e9),
        _gpu("a10g", "A10G", 70e12, 24 * 10**9, 600e9, _PCIE4, 12.5e9),
    )
}

# Words in JAX's device name -> kind. The first row with all its words in the name is used.
_WORDS = (
    (("tpu", "v6"), "v6e"), (("tpu", "v6e"), "v6e"), (("tpu", "v5", "lite"), "v5e"), (("tpu", "v5e"), "v5e"),
    (("tpu", "v5"), "v5p"), (("tpu", "v5p"), "v5p"), (("tpu", "v4"), "v4"),
    (("h100", "nvl"), "h100-nvl"), (("h100", "pcie"), "h100-pcie"),
    (("a100", "40gb"), "a100-40gb"),
    *(((kind,), kind) for kind in ("b200", "gb200", "gh200", "h200", "h100", "a100", "l40s", "l40", "l4", "a10g",
                                   "a10")),
)  # fmt: skip


def find_accelerator(device_kind: str) -> Accelerator | None:
    """The accelerator with this JAX device name ("NVIDIA H100 80GB HBM3", "TPU v5 lite") or kind ("h100").

    None if it is unknown. Complete words are compared: an "RTX A1000" is not an A100, a "GB200" is not a B200.
    """
    if device_kind.lower() in ACCELERATORS:
        return ACCELERATORS[device_kind.lower()]
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    kind = next((kind for wanted, kind in _WORDS if words.issuperset(wanted)), "")
    return ACCELERATORS.get(kind)


def has_tpu(pci: str = "/sys/bus/pci/devices", devices: str = "/dev") -> bool:
    """Whether a TPU is attached to this machine, according to its device file or the vendor id on the PCI bus."""
    if os.path.exists(os.path.join(devices, "accel0")):
        return True
    return any(_first_line(path) == "0x1ae0" for path in glob.glob(os.path.join(pci, "*", "vendor")))


def has_accelerator(pci: str = "/sys/bus/pci/devices", devices: str = "/dev") -> bool:
    """Whether this machine has a GPU or TPU that JAX could use. Reads only /dev and /sys."""
    gpus = ("nvidia0", "nvidiactl", "dxg", "kfd")
    return any(os.path.exists(os.path.join(devices, name)) for name in gpus) or has_tpu(pci, devices)


def is_cpu_only(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX will use CPUs: JAX_PLATFORMS=cpu, or no accelerator, or no plugin for one. Does not import JAX."""
    platforms = environment.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    return not any(map(find_spec, ("jax_plugins", "libtpu"))) or not has_accelerator()


def keep_to_cpus(environment: "os._Environ[str]" = os.environ) -> None:
    """Set JAX_PLATFORMS=cpu on a machine without accelerators.

    Otherwise an installed plugin (`lmtrain plan` uses them) costs a second at each start and prints a page of warnings.
    """
    if not environment.get("JAX_PLATFORMS") and is_cpu_only(environment):
        environment["JAX_PLATFORMS"] = "cpu"


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""
