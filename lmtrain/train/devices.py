"""What accelerators can do: peak speed and memory, by the names that JAX gives them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Device:
    """A kind of accelerator. `peak_flops` per second are dense products of 16-bit numbers, `memory` is in bytes."""

    name: str
    peak_flops: float
    memory: int


_GIB = 2**30

# Part of JAX's name in lower case -> what it is; the first that fits counts. From the makers' data sheets; TPU v4 and
# later are one device a chip.
_KINDS = (
    ("b200", Device("NVIDIA B200", 2.25e15, 180 * _GIB)),
    ("h200", Device("NVIDIA H200", 989e12, 141 * 10**9)),
    ("h100 nvl", Device("NVIDIA H100 NVL", 835e12, 94 * 10**9)),
    ("h100 pcie", Device("NVIDIA H100 PCIe", 756e12, 80 * _GIB)),
    ("h100", Device("NVIDIA H100", 989e12, 80 * _GIB)),
    ("a100-sxm4-40", Device("NVIDIA A100 40GB", 312e12, 40 * _GIB)),
    ("a100-pcie-40", Device("NVIDIA A100 40GB", 312e12, 40 * _GIB)),
    ("a100", Device("NVIDIA A100", 312e12, 80 * _GIB)),
    ("l40s", Device("NVIDIA L40S", 362e12, 48 * 10**9)),
    ("l4", Device("NVIDIA L4", 121e12, 24 * 10**9)),
    ("a10", Device("NVIDIA A10", 125e12, 24 * 10**9)),
    ("v6 lite", Device("TPU v6e", 918e12, 32 * _GIB)),
    ("v6e", Device("TPU v6e", 918e12, 32 * _GIB)),
    ("v5 lite", Device("TPU v5e", 197e12, 16 * _GIB)),
    ("v5e", Device("TPU v5e", 197e12, 16 * _GIB)),
    ("v5", Device("TPU v5p", 459e12, 95 * _GIB)),
    ("v4", Device("TPU v4", 275e12, 32 * _GIB)),
)

NAMES = ("b200", "h200", "h100", "a100", "a100-sxm4-40", "l40s", "l4", "a10", "v6e", "v5e", "v5p", "v4")


def find_device(kind: str) -> Device | None:
    """What JAX calls `kind`, or a person `h100` or `v5p`; None if it is not known."""
    kind = kind.lower().replace("v5p", "v5")
    return next((device for part, device in _KINDS if part in kind), None)


def is_cpu_only(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX will compute on CPUs: told so, or installed without support for anything else. It is not started."""
    platforms = environment.get("JAX_PLATFORMS")
    return platforms == "cpu" if platforms else not any(map(find_spec, ("jax_plugins", "libtpu")))
