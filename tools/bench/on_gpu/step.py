"""The training step of a config as lmtrain compiles it: memory, bound, and rows of a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from on_gpu.device import accelerator, device

from lmtrain.plan.figures import compiled_figures, memory_of
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import Program, build_program


@dataclass(frozen=True)
class Step:
    """A compiled step; `compiled` has no arrays yet."""

    program: Program
    compiled: Any

    @property
    def memory(self) -> float:
        """Bytes at the peak, by the compiler."""
        return memory_of(self.compiled, self.program.platform)["peak"]

    @property
    def tokens(self) -> int:
        return self.program.config.trainer.train_batch_size * self.program.config.model.seq_len


def compile_step(model: dict[str, Any], sequences: int, vocab: int, masks_documents: bool = True) -> Step:
    config = RunConfig(
        model=model,
        trainer={"train_batch_size": sequences, "mp": "p=f32,c=bfloat16"},
        data={"tokenizer": "passthrough", "vocab_size": vocab, "mask_across_documents": masks_documents},
    )
    program = build_program(config, vocab, [device()])
    return Step(program, program.compile())


def runner(step: Step) -> Callable[[], Any]:
    """A function that runs the step on random tokens, from a new state."""
    config = step.program.config
    shape = (config.trainer.train_batch_size, config.model.seq_len)
    batch = {name: np.zeros(shape, dtype) for name, dtype in config.batch_types.items()}
    batch["tokens"] = random_tokens(shape, config.data.vocab_size)
    batch["loss_mask"] = np.ones(shape, bool)
    batch["loss_mask"][:, -1] = False
    if "segments" in batch:
        batch["segments"] += (np.arange(shape[1]) >= shape[1] // 3).astype(np.int32)
    placed = jax.device_put(batch, step.program.layout.batch)
    state = step.program.init()

    def run() -> Any:
        nonlocal state
        state, metrics, _ = step.compiled(state, placed)
        return metrics

    return run


def random_tokens(shape: tuple[int, int], vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, shape, dtype=np.int32)


def row(name: str, step: Step, seconds: float, dry: bool) -> dict[str, Any]:
    """Its time, and how it compares with the device's rates."""
    rates = accelerator(dry)
    figures = compiled_figures(step.program, step.compiled, step.compiled.as_text(), "train", rates)
    limits = {}
    if rates:
        best = figures["seconds"]
        limits = {"bound, ms": 1000 * best["total"], "limited by": best["limited_by"]}
        limits["share of the bound"] = f"{best['total'] / seconds:.0%}"
    return {
        **speed(name, step, seconds, dry),
        "attention": step.program.attention.name,
        "memory, GiB": step.memory / 2**30,
        **limits,
    }


def speed(name: str, step: Step, seconds: float, dry: bool) -> dict[str, Any]:
    """Time and rates of a step with the tokens and FLOPs of `step`, by lmtrain or by a peer."""
    rates, rate = accelerator(dry), step.tokens / seconds
    found = {"system": name, "device": "this one", "ms": 1000 * seconds, "tokens/s": rate}
    if rates:
        full, causal = (rate * flops / rates.peak_flops for flops in step.program.flops_per_token)
        found |= {"MFU": f"{full:.0%}", "MFU, causal": f"{causal:.0%}"}
    return found
