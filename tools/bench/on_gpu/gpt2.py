"""GPT-2 124M: the loss alone, and full steps of lmtrain and of PyTorch, next to the published figures of llm.c.

The peers do not keep packed documents apart; lmtrain does by default, so it has a row for each.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from on_gpu.device import accelerator, device, platform
from on_gpu.published import GPT2
from on_gpu.results import Result, Table
from on_gpu.step import compile_step, random_tokens, row, runner, speed
from on_gpu.timing import Pace, finish, take_turns

from lmtrain.models.interface import Head
from lmtrain.objectives.cross_entropy import CrossEntropyRow
from lmtrain.objectives.row_losses import sum_of_row_losses
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

# PyTorch's compiler is given up after these seconds.
COMPILE_SECONDS = 70


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2 and of its batch. lmtrain and the peers pad the vocabulary to a multiple of 128."""

    vocab: int
    dim: int
    heads: int
    layers: int
    length: int
    sequences: int

    @property
    def text(self) -> str:
        return f"{self.layers} layers of {self.dim}, {self.sequences} x {self.length} tokens per step"

    @property
    def padded(self) -> int:
        return -(-self.vocab // 128) * 128


FULL, NANO = Size(50257, 768, 12, 12, 1024, 32), Size(500, 32, 2, 2, 32, 2)


def run(dry: bool, pace: Pace) -> Iterator[Result]:
    size = NANO if dry else FULL
    yield loss(size, dry, pace)
    yield steps(size, dry, pace)


def loss(size: Size, dry: bool, pace: Pace) -> Table:
    """Only the loss and its gradients, from hidden states in bfloat16."""
    rng = np.random.default_rng(0)
    shape = (size.sequences, size.length)
    hidden = jnp.asarray(rng.normal(size=(*shape, size.dim)), jnp.bfloat16)
    head = jnp.asarray(0.02 * rng.normal(size=(size.padded, size.dim)), jnp.bfloat16)
    targets, mask = jnp.asarray(random_tokens(shape, size.vocab)), jnp.ones(shape, bool)
    with build_layout(PartitioningConfig(), [device()]).active():
        gradients = jax.jit(
            jax.value_and_grad(
                lambda h, w: sum_of_row_losses(CrossEntropyRow(), Head(h, w, size.vocab), targets, mask), (0, 1)
            )
        )
        seconds = take_turns({"loss": lambda: gradients(hidden, head)}, pace)["loss"]
    flops, rates = 6 * hidden.size * size.padded, accelerator(dry)
    found = {"ms": 1000 * seconds, "TFLOP/s": flops / seconds / 1e12}
    if rates:
        found["share of the peak"] = f"{flops / seconds / rates.peak_flops:.0%}"
    return Table(f"Loss and its gradients: {size.text}, {size.vocab:,} ids", [found])


def steps(size: Size, dry: bool, pace: Pace) -> Table:
    model = {"type": "gpt2", "hidden_dim": size.dim, "num_heads": size.heads, "num_layers": size.layers,
             "seq_len": size.length, "gradient_checkpointing": False, "scan_layers": False}  # fmt: skip
    ours = {
        "lmtrain": compile_step(model, size.sequences, size.vocab),
        "lmtrain, documents not kept apart": compile_step(model, size.sequences, size.vocab, masks_documents=False),
    }
    runs = {name: runner(step) for name, step in ours.items()}
    peers, failed = torch_runs(size)
    seconds = take_turns(runs | peers, pace)
    rows = [row(name, step, seconds[name], dry) for name, step in ours.items()]
    rows += [speed(name, ours["lmtrain"], seconds[name], dry) for name in peers]
    rows += [{"system": name, "note": why} for name, why in failed.items()]
    return Table(f"Steps of GPT-2 124M: {size.text}", rows + GPT2)


def torch_runs(size: Size) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Steps of the same model in PyTorch with autocast, eager and compiled; and why those that fail do."""
    found, failed = {}, {}
    for name, compiles in (("PyTorch, eager", False), ("PyTorch, compiled", True)):
        try:
            with limited(COMPILE_SECONDS):
                run = torch_run(size, compiles)
                finish(run())
            found[name] = run
        except Exception as error:  # a peer's failure is not ours
            failed[name] = f"failed: {' '.join(str(error).split())[:200]}"
    return found, failed


def torch_run(size: Size, compiles: bool) -> Callable[[], Any]:
    import torch
    from torch_gpt2 import Gpt2, Trainer

    place = "cuda" if platform() == "gpu" else "cpu"
    tokens = torch.from_numpy(random_tokens((size.sequences, size.length), size.vocab).astype(np.int64)).to(place)
    with torch.device(place):
        trainer = Trainer(Gpt2(size.padded, size.length, size.dim, size.layers, size.heads))
    if compiles:
        # the C++ of a CPU takes as long to compile as the rest of a dry run
        backend = "inductor" if place == "cuda" else "aot_eager"
        trainer.model.forward = torch.compile(trainer.model.forward, backend=backend)

    def run() -> Any:
        with torch.device(place), torch.autocast(place, torch.bfloat16):
            return trainer.step(tokens)

    return run


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError within the context after these seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
