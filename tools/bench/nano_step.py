"""The nano training step compared with an eager torch model of the same shapes, and with the matrix-product floor.

    .venv/bin/python tools/bench/nano_step.py [ROUNDS]

Torch and lmtrain alternate in one process, so that both see the same machine. Times are the minimum and the median
over the rounds; ratios are of medians. The floor is the step's matrix-product FLOPs over the rate of a large product
measured in between.
"""

import os
import sys
import time
from collections.abc import Callable
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch_gpt2 import Gpt2, Trainer

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.registry import build_model
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.objectives.interface import LOSS, Weighted
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.schedules import build_schedule
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.step.state import init_state, state_shardings
from lmtrain.train.step.step import TrainStep, build_train_step

LAYERS, DIM, HEADS, LENGTH, BATCH, VOCAB = 4, 256, 4, 256, 8, 8192
PRODUCT = 2048


def lmtrain_step(tokens: np.ndarray, **execution: bool) -> Callable[[], float]:
    config = Gpt2Config(num_layers=LAYERS, hidden_dim=DIM, num_heads=HEADS, seq_len=LENGTH, **execution)
    adam = AdamConfig(learning_rate=1e-3, weight_decay=0.1)
    layout = build_layout(PartitioningConfig())
    model = build_model(config, VOCAB)
    schedule = build_schedule(adam, 1000)
    optimizer = build_optimizer(adam, schedule)
    abstract, shardings = state_shardings(model, optimizer, layout, "float32")
    state = init_state(model, optimizer, abstract, shardings, seed=0)
    step = build_train_step(
        TrainStep(
            model=model,
            objective={LOSS: Weighted(CrossEntropy())},
            optimizer=optimizer,
            schedule=schedule,
            num_microbatches={BATCH: 1},
        ),
        layout,
        shardings,
    )
    mask = np.ones((BATCH, LENGTH), bool)
    mask[:, -1] = False
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "loss_mask": jnp.asarray(mask)}
    holder = [state]

    def run() -> float:
        holder[0], metrics, _ = step(holder[0], batch)
        return float(metrics["train/loss"])

    return run


def matrix_product() -> Callable[[], float]:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(PRODUCT, PRODUCT)), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: float(product(x, x)[0, 0])


def product_flops() -> float:
    """FLOPs of all matrix products of one step, forward and backward (3x), with full attention."""
    tokens = BATCH * LENGTH
    block = 2 * tokens * DIM * (3 * DIM + DIM + 8 * DIM) + 4 * tokens * LENGTH * DIM
    return 3.0 * (LAYERS * block + 2 * tokens * DIM * VOCAB)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    trainer = Trainer(Gpt2(VOCAB, LENGTH, DIM, LAYERS, HEADS))
    torch_tokens = torch.from_numpy(tokens)
    runs = {
        "torch, eager": lambda: float(trainer.step(torch_tokens)),
        "lmtrain, unrolled": lmtrain_step(tokens, scan_layers=False, gradient_checkpointing=False),
        "lmtrain, scanned": lmtrain_step(tokens, scan_layers=True, gradient_checkpointing=False),
        f"product {PRODUCT}^3": matrix_product(),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn >= 2:  # the first compiles
                times[name].append(time.perf_counter() - began)
    peer = median(times["torch, eager"])
    rate = 2.0 * PRODUCT**3 / median(times[f"product {PRODUCT}^3"])
    for name, seconds in times.items():
        ratio = f"{peer / median(seconds):.2f} x torch" if name.startswith("lmtrain") else ""
        print(f"{name:<20} min {1000 * min(seconds):6.0f} ms  median {1000 * median(seconds):6.0f} ms  {ratio}")
    print(
        f"floor: {product_flops() / 1e9:.0f} GFLOP at {rate / 1e9:.0f} GFLOP/s = {1000 * product_flops() / rate:.0f} ms"
    )


if __name__ == "__main__":
    main()
