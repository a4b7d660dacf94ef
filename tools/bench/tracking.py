"""What it costs to log every step: the trackers' time, as a part of the nano step's.

    .venv/bin/python tools/bench/tracking.py [LOGS]

Logs what a step logs to the JSON log, TensorBoard and W&B (offline, the real library), every 5 ms. Two figures: how
long the training thread is held up by a log, and how much processor time all threads and W&B's own process spend on
it, which a step on the same cores has to go without. The step is that of tools/bench/nano_step.py, in the same run.
"""

import os
import resource
import sys
import tempfile
import time
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
from nano_step import BATCH, LENGTH, VOCAB, lmtrain_step

from lmtrain.tracking.config import TensorboardConfig, WandbConfig
from lmtrain.tracking.open import open_trackers

PAUSE_SECONDS = 0.005
METRICS = 16  # of a nano step: 14, and 24 more every ten steps


def processor_seconds() -> float:
    """Of this process and those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def idle_seconds(logs: int) -> float:
    """Processor time of only pausing."""
    began = processor_seconds()
    for _ in range(logs):
        time.sleep(PAUSE_SECONDS)
    return processor_seconds() - began


def main() -> None:
    logs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH))
    run = lmtrain_step(tokens, scan_layers=False, gradient_checkpointing=False)
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
    print(f"the step's thread is held up for {1e6 * median(held):.0f} us: {100 * median(held) / step:.3f} % of it")
    print(f"all threads and W&B use {1e6 * used / logs:.0f} us a log: {100 * used / logs / step:.2f} % (goal 1 %)")


if __name__ == "__main__":
    main()
