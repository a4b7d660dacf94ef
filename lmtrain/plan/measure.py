"""Measurement: run a few steps of a program on this machine's devices, with random tokens."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from lmtrain.plan.figures import compiled_figures
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.sharding.placement import LocalPart
from lmtrain.train.program.program import Program

MIN_STEPS, MAX_STEPS, SECONDS = 3, 20, 10.0


def measure(program: Program, accelerator: Accelerator | None) -> dict[str, Any]:
    """Figures of the compiled training step, and in `seconds` the median time of a step after the first."""
    batch_size = max(program.batching.num_microbatches)
    shape = (batch_size, program.config.model.seq_len)
    part = LocalPart.of(program.layout.batch, *shape)
    tokens = np.random.default_rng(0).integers(0, program.model.vocab_size, shape, dtype=np.int32)
    batch = {name: np.zeros(shape, dtype) for name, dtype in program.config.batch_types.items()}
    batch |= {"tokens": tokens, "loss_mask": np.ones(shape, bool)}
    placed = part.place(part.cut(batch))
    compiled = program.compile()
    state = program.init()
    seconds: list[float] = []
    while len(seconds) <= MIN_STEPS or (sum(seconds) < SECONDS and len(seconds) <= MAX_STEPS):
        began = time.perf_counter()
        state, metrics, _ = compiled(state, placed)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    figures = compiled_figures(program, compiled, compiled.as_text(), "train", accelerator)
    median = statistics.median(seconds[1:])
    return figures | {
        "seconds": {**figures.get("seconds", {}), "total": median, "steps": len(seconds) - 1},
        "tokens_per_second": batch_size * shape[1] / median,
    }
