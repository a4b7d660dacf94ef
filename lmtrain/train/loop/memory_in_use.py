"""Memory in use by a run, on its devices and on this host."""

import resource
import sys
from collections.abc import Iterable
from typing import Any


def memory_in_use(devices: Iterable[Any]) -> dict[str, float]:
    """`memory/device_<id>/bytes` and `.../peak_bytes` of devices that report them, and `memory/host_peak_bytes`."""
    metrics = {}
    for device in devices:
        stats = device.memory_stats() or {}  # CPUs have none
        for name, key in (("bytes", "bytes_in_use"), ("peak_bytes", "peak_bytes_in_use")):
            if key in stats:
                metrics[f"memory/device_{device.id}/{name}"] = float(stats[key])
    unit = 1 if sys.platform == "darwin" else 1024
    metrics["memory/host_peak_bytes"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return metrics
