"""The device of a part: its rates and its memory."""

import jax

from lmtrain.runtime.accelerators import ACCELERATORS, Accelerator, find_accelerator
from lmtrain.sharding.mesh import platform_of
from lmtrain.train.program.out_of_memory import device_memory


def device() -> jax.Device:
    return jax.devices()[0]


def platform() -> str:
    return platform_of(device())


def accelerator(dry: bool) -> Accelerator | None:
    """The rates of the device, None if they are unknown. A dry run on another device has those of an H100."""
    return find_accelerator(device().device_kind) or (ACCELERATORS["h100"] if dry else None)


def memory() -> float:
    """Bytes that a program may take: what JAX may reserve, less a share for fragmentation."""
    return 0.95 * (device_memory(device()) or float("inf"))
