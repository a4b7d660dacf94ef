"""This machine: CPU cores, accelerators, how malloc returns memory, installed packages, the parent process. Does not
import JAX.
"""

import ctypes
import glob
import math
import os
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec

_QUOTA = "/sys/fs/cgroup/cpu.max"  # cgroups v2: `<quota> <period>` in microseconds, or `max <period>`

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def usable_cores() -> int:
    """CPU cores of this process, limited by its affinity (Slurm) and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open(_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroups v2, or no limit
        return cores


def keep_freed_memory() -> None:
    """Configure malloc to keep freed memory, in one heap. No effect with a C library other than glibc.

    Call it before any thread is started: an existing heap of a thread is kept and reused by later threads, and large
    blocks would bypass the main heap.

    By default glibc maps every large block with mmap and unmaps it when it is freed. On a CPU the arrays of a step are
    such blocks: unmapping them pauses training between steps, and mapping them again causes a page fault for every
    4 KiB. The cost: the process never shrinks below its peak size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_ARENA_MAX, 1)


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


def installed_version(package: str) -> str | None:
    """The version of a Python package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def end_with_parent(parent: int) -> None:
    """From now on, end this process at once when its parent is no longer the process `parent`."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
