"""Number of CPU cores available to this process."""

import math
import os

_QUOTA = "/sys/fs/cgroup/cpu.max"  # cgroups v2: `<quota> <period>` in microseconds, or `max <period>`


def usable_cores() -> int:
    """CPU cores of this process, limited by its affinity (Slurm) and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open(_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroups v2, or no limit
        return cores
