"""The first losses of a float32 model on this device, and of the same run on the CPU.

Both start within rounding and training doubles the difference every few steps: two types of CPU differ by 2e-8 in the
first loss of gpt2_nano, 8e-7 after 50 steps and 2e-3 after 120 (tests/golden/test_curve.py). A wrong gradient differs
in the first steps. Products are in full float32, without the TF32 that GPUs use otherwise.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from on_gpu.results import Result, Table, Verdict
from on_gpu.timing import Pace
from on_gpu.training import finish, losses, start

# (steps, maximum relative difference of a loss in them)
TOLERANCES = [(10, 1e-5), (50, 1e-3), (100, 2e-2)]
MODEL = {"type": "gpt2", "hidden_dim": 128, "num_heads": 2, "num_layers": 2, "seq_len": 128}
NANO = {"hidden_dim": 32, "seq_len": 32}


def run(dry: bool, pace: Pace) -> Iterator[Result]:
    trainer = {"num_train_steps": 100, "train_batch_size": 8, "mp": "f32"}
    full = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    model = MODEL | NANO if dry else MODEL
    folders = Path("device"), Path("cpu")
    processes = [
        start(folder, model, trainer, **full, **more)
        for folder, more in zip(folders, ({}, {"JAX_PLATFORMS": "cpu"}), strict=True)
    ]
    for folder, process in zip(folders, processes, strict=True):
        finish(folder, process)
    here, on_cpu = ([loss for _, loss in losses(folder)] for folder in folders)
    yield table(here, on_cpu)
    yield judge(here, on_cpu)


def largest(here: Sequence[float], on_cpu: Sequence[float], steps: int) -> float:
    """The maximum relative difference in the first `steps` steps, NaN if a loss is."""
    found, expected = np.array(here[:steps]), np.array(on_cpu[:steps])
    return float(np.max(np.abs(found - expected) / np.abs(expected)))


def table(here: Sequence[float], on_cpu: Sequence[float]) -> Table:
    rows = [
        {
            "steps": steps,
            "loss": here[steps - 1],
            "on the CPU": on_cpu[steps - 1],
            "largest difference": largest(here, on_cpu, steps),
            "tolerance": tolerance,
        }
        for steps, tolerance in TOLERANCES
    ]
    return Table("Losses in float32 on this device and on the CPU", rows)


def judge(here: Sequence[float], on_cpu: Sequence[float]) -> Verdict:
    if len(here) != len(on_cpu) or len(here) != TOLERANCES[-1][0]:
        return Verdict("curves", False, f"{len(here)} and {len(on_cpu)} losses, expected {TOLERANCES[-1][0]}")
    apart = [(steps, largest(here, on_cpu, steps), tolerance) for steps, tolerance in TOLERANCES]
    wrong = [
        f"{found:.2g} in {steps} steps, tolerance {limit:g}" for steps, found, limit in apart if not found <= limit
    ]
    text = "; ".join(wrong) or f"losses differ by at most {apart[-1][1]:.2g} in {apart[-1][0]} steps"
    return Verdict("curves", not wrong, text)
