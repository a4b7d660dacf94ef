"""Benchmarks on one GPU: the training step, each attention backend, the loss, and PyTorch with the same shapes.

    python tools/bench/gpu.py [--json FILE] [SIZE ...]        sizes: 124m, 1.3b (both by default), nano

Prints tables; --json writes the same figures. Each size takes about three minutes; `nano` runs on any device, to test
the tool. Every attention backend is first compared with float32 attention; the exit code is 1 if one of them is wrong.
Times are medians of rounds with alternating candidates, after a warm-up. MFU counts full attention, relative to the
device's peak of dense bfloat16 products. References: llm.c 475 k tokens/s for 124M on an H100, llm-foundry 45.5 k
for 1.3B.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for PyTorch

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.attention.choose import choose_attention
from lmtrain.models.attention.kernel import kernels, self_attend
from lmtrain.models.attention.names import AttentionNeeds
from lmtrain.objectives.cross_entropy import CrossEntropyRow
from lmtrain.objectives.row_losses import sum_of_row_losses
from lmtrain.plan.figures import memory_of
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout, platform_of
from lmtrain.train.program.program import build_program

VOCAB = 50257
ROUNDS, WARM_UP = 7, 2
# A round repeats short functions, so that the clock's error does not matter.
LEAST_SECONDS = 0.2
# Maximum error of outputs and gradients in bfloat16 against float32, relative to their norm.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2 and of one batch."""

    name: str
    dim: int
    heads: int
    layers: int
    length: int
    batch: int


SIZES = {
    size.name: size
    for size in (
        Size("124m", 768, 12, 12, 1024, 32),
        Size("1.3b", 2048, 16, 24, 2048, 8),
        Size("nano", 64, 2, 2, 128, 4),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", choices=[*SIZES, []], help="default: 124m 1.3b")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    flags = parser.parse_args()
    device = jax.devices()[0]
    sizes = [SIZES[name] for name in flags.sizes or ("124m", "1.3b")]
    if platform_of(device) == "cpu" and any(size.name != "nano" for size in sizes):
        parser.error("no GPU found; the size nano runs on any device")
    figures: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "sizes": {}}
    for size in sizes:
        print(f"\n{size.name}: {asdict(size)} on {device.device_kind}", flush=True)
        figures["sizes"][size.name] = {
            "attention": attention(size),
            "loss": loss(size),
            "steps": steps(size),
        }
    text = json.dumps(figures, indent=1)
    print(text)
    if flags.json:
        Path(flags.json).write_text(text)
    wrong = [row for size in figures["sizes"].values() for row in size["attention"] if row["error"] > TOLERANCE]
    for row in wrong:
        print(f"WRONG: {row['backend']} attention differs by {row['error']:.3g} from float32", file=sys.stderr)
    return 1 if wrong else 0


def attention(size: Size) -> list[dict[str, Any]]:
    """Forward and backward pass of one layer's attention by each backend, with and without packed documents."""
    rng = np.random.default_rng(0)
    shape = (size.batch, size.heads, size.length, size.dim // size.heads)
    q, k, v, d = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4))
    ends = np.sort(rng.integers(1, size.length, (size.batch, 3)))
    documents = jnp.asarray((np.arange(size.length) >= ends[..., None]).sum(1), jnp.int32)
    rows, runs = [], {}
    for segments in (None, documents):
        exact = _attention_run("xla", segments, jnp.float32)(q[:1], k[:1], v[:1], d[:1])
        for backend in (kernel.name for kernel in kernels()):
            features = frozenset() if segments is None else frozenset({"segments"})
            try:
                choose_attention(AttentionNeeds(backend, features, size.length), platform_of(jax.devices()[0]))
            except Exception:  # unsupported: for another device, or without documents
                continue
            run = _attention_run(backend, segments, jnp.bfloat16)
            try:
                error = max(map(_apart, run(q[:1], k[:1], v[:1], d[:1]), exact))
                runs[backend, segments is not None] = lambda run=run: run(q, k, v, d)
                jax.block_until_ready(run(q, k, v, d))
            except Exception as failure:  # reported in the table; the others continue
                rows.append({"backend": backend, "documents": segments is not None, "error": float("inf"),
                             "failure": str(failure)[:300]})  # fmt: skip
                runs.pop((backend, segments is not None), None)
                continue
            rows.append({"backend": backend, "documents": segments is not None, "error": error})
    seconds = take_turns(runs)
    flops = 3.5 * 4 * size.batch * size.heads * size.length**2 / 2 * shape[-1]
    for row in rows:
        taken = seconds.get((row["backend"], row["documents"]))
        if taken is not None:
            row |= {"ms": 1000 * taken, "tflops": flops / taken / 1e12}
    print_table("attention of one layer, forward and backward", rows)
    return rows


def _attention_run(backend: str, segments: jax.Array | None, dtype: Any) -> Callable[..., Any]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> Any:
        def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            own = None if segments is None else segments[: q.shape[0]]
            return self_attend(backend, q, k, v, q.shape[-1] ** -0.5, segments=own)

        mixed, pull_back = jax.vjp(mix, *(x.astype(dtype) for x in (q, k, v)))
        return mixed, *pull_back(d.astype(dtype))

    return jax.jit(run)


def _apart(result: jax.Array, exact: jax.Array) -> float:
    result, exact = (np.asarray(x, np.float64) for x in (result, exact))
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def loss(size: Size) -> dict[str, Any]:
    """Only the loss and its gradients, from hidden states in bfloat16."""
    rng = np.random.default_rng(0)
    padded = -(-VOCAB // 128) * 128
    hidden = jnp.asarray(rng.normal(size=(size.batch, size.length, size.dim)), jnp.bfloat16)
    head = jnp.asarray(0.02 * rng.normal(size=(padded, size.dim)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, VOCAB, (size.batch, size.length)), jnp.int32)
    mask = jnp.ones(targets.shape, bool)
    with build_layout(PartitioningConfig(), jax.devices()[:1]).active():
        run = jax.jit(
            jax.value_and_grad(lambda h, w: sum_of_row_losses(CrossEntropyRow(), h, w, targets, mask, VOCAB), (0, 1))
        )
        seconds = take_turns({"loss": lambda: run(hidden, head)})["loss"]
    row = {"ms": 1000 * seconds, "tflops": 6 * hidden.size * padded / seconds / 1e12}
    print_table("loss with gradients", [row])
    return row


def steps(size: Size) -> list[dict[str, Any]]:
    """The full step: lmtrain with and without gradient checkpointing, and PyTorch, eager and compiled."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (size.batch, size.length))
    runs: dict[str, Callable[[], Any]] = {}
    rows = []
    for name, execution in (
        ("lmtrain, unrolled", {"gradient_checkpointing": False, "scan_layers": False}),
        ("lmtrain, checkpointing", {"gradient_checkpointing": True}),
    ):
        runs[name], row = lmtrain_step(size, tokens, execution)
        rows.append({"name": name, **row})
    peers, why = torch_steps(size, tokens)
    runs |= peers
    rows += [{"name": name} for name in peers]
    seconds = take_turns(runs)
    accelerator = find_accelerator(jax.devices()[0].device_kind)
    weights = 12 * size.layers * size.dim**2 + VOCAB * size.dim
    flops = 6 * weights + 12 * size.layers * size.length * size.dim
    for row in rows:
        rate = size.batch * size.length / seconds[row["name"]]
        row |= {"ms": 1000 * seconds[row["name"]], "tokens_per_second": rate}
        if accelerator is not None:
            row["mfu"] = rate * flops / accelerator.peak_flops
    print_table("training step", rows)
    if why:
        print(f"PyTorch: {why}")
    return rows


def lmtrain_step(
    size: Size, tokens: np.ndarray, execution: dict[str, bool]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that runs a step, and the memory of the step in GiB."""
    config = RunConfig(
        model={"type": "gpt2", "hidden_dim": size.dim, "num_heads": size.heads, "num_layers": size.layers,
               "seq_len": size.length, **execution},
        trainer={"train_batch_size": size.batch, "mp": "p=f32,c=bfloat16"},
        data={"tokenizer": "passthrough", "vocab_size": VOCAB},
    )  # fmt: skip
    program = build_program(config, VOCAB, jax.devices()[:1])
    segments = (np.arange(size.length) >= size.length // 3) * np.ones((size.batch, 1))
    mask = np.ones(tokens.shape, bool)
    mask[:, -1] = False
    batch = {"tokens": tokens.astype(np.int32), "loss_mask": mask, "segments": segments.astype(np.int32)}
    batch = jax.device_put(batch, program.layout.batch)
    compiled = program.compile()
    holder = [program.init()]

    def run() -> Any:
        holder[0], metrics, _ = compiled(holder[0], batch)
        return metrics

    jax.block_until_ready(run())
    stats = jax.devices()[0].memory_stats() or {}
    memory = memory_of(compiled, program.platform)
    return run, {
        "attention": program.attention.name,
        "compiler_gib": memory["peak"] / 2**30,
        "state_gib": program.memory_use.total / 2**30,
        "most_in_use_gib": stats.get("peak_bytes_in_use", 0) / 2**30,  # of the process so far
    }


def torch_steps(size: Size, tokens: np.ndarray) -> tuple[dict[str, Callable[[], Any]], str]:
    """Steps of the same model in PyTorch with autocast; if that is not available, the reason."""
    try:
        import torch
        from torch_gpt2 import Gpt2, Trainer
    except ImportError:
        return {}, "not installed"
    on_gpu = platform_of(jax.devices()[0]) == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}, "this build has no CUDA"
    device = "cuda" if on_gpu else "cpu"
    given = torch.from_numpy(tokens).to(device)

    def step(compiles: bool) -> Callable[[], Any]:
        with torch.device(device):
            trainer = Trainer(Gpt2(VOCAB, size.length, size.dim, size.layers, size.heads))
        if compiles:
            trainer.model.forward = torch.compile(trainer.model.forward)

        def run() -> Any:
            with torch.device(device), torch.autocast(device, torch.bfloat16):
                result = trainer.step(given)
            if on_gpu:
                torch.cuda.synchronize()
            return result

        return run

    return {"torch, eager": step(False)} | ({"torch, compiled": step(True)} if on_gpu else {}), ""


def take_turns(runs: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Median seconds of each; they alternate, so that all see the same machine."""
    repeats = {}
    for name, run in runs.items():
        for _ in range(WARM_UP):
            jax.block_until_ready(run())
        began = time.perf_counter()
        jax.block_until_ready(run())
        repeats[name] = max(int(LEAST_SECONDS / max(time.perf_counter() - began, 1e-6)), 1)
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                result = run()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - began) / repeats[name])
    return {name: median(seconds) for name, seconds in times.items()}


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(f"\n{title}\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        cells = (f"{row[name]:.4g}" if isinstance(row.get(name), float) else str(row.get(name, "")) for name in names)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
