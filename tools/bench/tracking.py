"""Cost of logging every step: the trackers' time relative to the nano step.

    .venv/bin/python tools/bench/tracking.py [LOGS]

Logs the metrics of a step to the JSON log, TensorBoard and W&B (offline, the real library), every 5 ms. Two figures:
the time for which a log blocks the training thread, and the processor time of all threads and W&B's process per log,
which is not available to a step on the same cores. The step is that of tools/bench/nano_step.py, in the same run.
"""

import os
import resource
import sys
import tempfile
import time
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from nano_step import SHAPES, lmtrain_step

from lmtrain.tracking.config import TensorboardConfig, WandbConfig
from lmtrain.tracking.open import open_trackers

PAUSE_SECONDS = 0.005
METRICS = 16  # a nano step has 14, and 24 more every ten steps


def processor_seconds() -> float:
    """Processor time of this process and its exited children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def idle_seconds(logs: int) -> float:
    """Processor time of the pauses alone."""
    began = processor_seconds()
    for _ in range(logs):
        time.sleep(PAUSE_SECONDS)
    return processor_seconds() - began


def main() -> None:
    logs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    run = lmtrain_step(SHAPES["nano"], scan_layers=False, gradient_checkpointing=False)
    steps = []
    for _ in range(22):
        began = time.perf_counter()
        run()
        steps.append(time.perf_counter() - began)
    step = median(steps[2:])
    metrics = {f"throughput/metric_{number}": 1.2345678 * number for number in range(METRICS)}
    with tempfile.TemporaryDirectory() as folder:
        configs = [TensorboardConfig(logdir=f"{folder}/tb"), WandbConfig(mode="offline", save_code=False)]
        trackers = open_trackers(configs, folder, "bench", 0)
        trackers.log(metrics, 0)
        time.sleep(10)  # until the libraries are imported and W&B's process runs
        pausing = idle_seconds(logs)
        used, held = processor_seconds(), []
        for number in range(1, logs + 1):
            time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            trackers.log(metrics, number)
            held.append(time.perf_counter() - began)
        trackers.finish()
        used = processor_seconds() - used - pausing
    print(f"nano step {1000 * step:.0f} ms")
    print(f"training thread blocked for {1e6 * median(held):.0f} us: {100 * median(held) / step:.3f} % of a step")
    share = 100 * used / logs / step
    print(f"all threads and W&B use {1e6 * used / logs:.0f} us per log: {share:.2f} % of a step (goal: 1 %)")


if __name__ == "__main__":
    main()
