"""How many cores this process may use."""

import math
import os

_QUOTA = "/sys/fs/cgroup/cpu.max"  # of control groups, version 2: `<microseconds> <of so many>`, or `max ...`


def usable_cores() -> int:
    """Less than the machine has under Slurm, which gives some of them, and in a container, which gives their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open(_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or no limit
        return cores
