"""The training step on a CPU compared with an eager torch model of the same shapes, and with the floor of the products.

    .venv/bin/python tools/bench/nano_step.py [SHAPE ...] [--rounds 16]

Each program has its own process, as its users run it, and the programs take turns of five steps, so that all see the
same machine; a pause before each turn lets torch's threads, which poll for a while after a step, go to sleep. Times
are of one step, ratios the median of those of the turns. The floor is the step's FLOPs of matrix products over the
rate of a large product in between.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

PRODUCT = 2048
STEPS, PAUSE = 5, 0.1


class Shape(NamedTuple):
    layers: int
    dim: int
    heads: int
    length: int
    batch: int
    vocab: int

    def tokens(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab, (self.batch, self.length))

    def product_flops(self) -> float:
        """FLOPs of all matrix products of one step, forward and backward (3x), with full attention."""
        tokens = self.batch * self.length
        block = 2 * tokens * self.dim * 12 * self.dim + 4 * tokens * self.length * self.dim
        return 3.0 * (self.layers * block + 2 * tokens * self.dim * self.vocab)


SHAPES = {
    "nano": Shape(4, 256, 4, 256, 8, 8192),
    "nanogpt_cpu": Shape(4, 128, 4, 64, 12, 256),  # nanoGPT's recipe for CPUs
    "wide": Shape(2, 768, 12, 512, 1, 8192),
}


def build_step(config: Any, adam: Any, vocab: int, rows: int) -> tuple[Any, Any, Any, Any]:
    """Model, layout, initial state and training step, in float32 on one device, of `rows` sequences at once."""
    from lmtrain.models.params import parameter_axes
    from lmtrain.models.registry import build_model
    from lmtrain.objectives.cross_entropy import CrossEntropy
    from lmtrain.objectives.interface import LOSS, Weighted
    from lmtrain.optim.optimizer import build_optimizer
    from lmtrain.optim.schedules import build_schedule
    from lmtrain.sharding.config import PartitioningConfig
    from lmtrain.sharding.mesh import build_layout
    from lmtrain.train.step.state import init_state, state_shardings
    from lmtrain.train.step.step import TrainStep, build_train_step

    layout = build_layout(PartitioningConfig())
    model = build_model(config, vocab)
    schedule = build_schedule(adam, 1000)
    optimizer = build_optimizer(adam, schedule, parameter_axes(model))
    abstract, shardings = state_shardings(model, optimizer, layout, "float32")
    state = init_state(model, optimizer, abstract, shardings, seed=0)
    step = build_train_step(
        TrainStep(
            model=model,
            objective={LOSS: Weighted(CrossEntropy())},
            optimizer=optimizer,
            schedule=schedule,
            num_microbatches={rows: 1},
        ),
        layout,
        shardings,
    )
    return model, layout, state, step


def lmtrain_step(shape: Shape, **execution: bool) -> Callable[[], float]:
    import jax.numpy as jnp

    from lmtrain.models.gpt2.config import Gpt2Config
    from lmtrain.optim.config import AdamConfig

    config = Gpt2Config(
        num_layers=shape.layers, hidden_dim=shape.dim, num_heads=shape.heads, seq_len=shape.length, **execution
    )
    adam = AdamConfig(learning_rate=1e-3, weight_decay=0.1)
    *_, state, step = build_step(config, adam, shape.vocab, shape.batch)
    mask = np.ones((shape.batch, shape.length), bool)
    mask[:, -1] = False
    batch = {"tokens": jnp.asarray(shape.tokens(), jnp.int32), "loss_mask": jnp.asarray(mask)}
    holder = [state]

    def run() -> float:
        holder[0], metrics, _ = step(holder[0], batch)
        return float(metrics["train/loss"])

    return run


def torch_step(shape: Shape) -> Callable[[], float]:
    import torch
    from torch_gpt2 import Gpt2, Trainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    trainer = Trainer(Gpt2(shape.vocab, shape.length, shape.dim, shape.layers, shape.heads))
    tokens = torch.from_numpy(shape.tokens())
    return lambda: float(trainer.step(tokens))


def matrix_product(_: Shape) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(np.random.default_rng(0).normal(size=(PRODUCT, PRODUCT)), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: float(product(x, x)[0, 0])


PEER, FLOOR = "torch, eager", f"product {PRODUCT}^3"
PROGRAMS: dict[str, Callable[[Shape], Callable[[], float]]] = {
    PEER: torch_step,
    "lmtrain, unrolled": lambda shape: lmtrain_step(shape, scan_layers=False, gradient_checkpointing=False),
    "lmtrain, scanned": lambda shape: lmtrain_step(shape, scan_layers=True, gradient_checkpointing=False),
    FLOOR: matrix_product,
}


def serve(program: str, shape: Shape) -> None:
    """Run steps when asked on the standard input; answer with the seconds of one."""
    if program.startswith("lmtrain"):
        from lmtrain.runtime.machine import keep_freed_memory

        keep_freed_memory()  # as `lmtrain train` does
    step = PROGRAMS[program](shape)
    for _ in range(3):  # the first compiles
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        print((time.perf_counter() - began) / STEPS, flush=True)


def measure(name: str, rounds: int) -> None:
    processes = {}
    for program in PROGRAMS:
        command = [sys.executable, __file__, name, "--serve", program]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", program
        processes[program] = process, process.stdin, process.stdout
    times: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for _ in range(rounds):
        for program, (_, ask, answer) in processes.items():
            time.sleep(PAUSE)
            print(file=ask, flush=True)
            times[program].append(float(answer.readline()))
    for process, ask, _ in processes.values():
        ask.close()
        process.wait()
    for program, seconds in times.items():
        ratio = median(peer / own for peer, own in zip(times[PEER], seconds, strict=True))
        shown = f"{ratio:.2f} x torch" if program.startswith("lmtrain") else ""
        print(
            f"{name:<12} {program:<18} min {1000 * min(seconds):6.1f} ms  median {1000 * median(seconds):6.1f} ms  "
            f"{shown}"
        )
    flops, rate = SHAPES[name].product_flops(), 2.0 * PRODUCT**3 / median(times[FLOOR])
    print(f"{name:<12} floor: {flops / 1e9:.0f} GFLOP at {rate / 1e9:.0f} GFLOP/s = {1000 * flops / rate:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; by default all")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--serve", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.shapes or SHAPES:
        if name not in SHAPES:
            parser.error(f"{name!r} is none of {', '.join(SHAPES)}")
        if arguments.serve:
            serve(arguments.serve, SHAPES[name])
        else:
            measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
