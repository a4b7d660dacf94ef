"""A run that is killed after its first checkpoint and resumed, and an undisturbed one: the same to the last bit.

Both run at the same time on the same device, with `xla_gpu_deterministic_ops`. They share no cache of compiled
programs: the resumed run compiles again, as on another day.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from on_gpu.results import Result, Table, Verdict
from on_gpu.timing import Pace
from on_gpu.training import arrays, finish, is_saved, losses, start

MODEL = {"type": "gpt2", "hidden_dim": 512, "num_heads": 8, "num_layers": 8, "seq_len": 1024, "resid_pdrop": 0.1}
NANO = {"hidden_dim": 32, "num_heads": 2, "num_layers": 2, "seq_len": 32}


def run(dry: bool, pace: Pace) -> Iterator[Result]:
    jax.config.update("jax_platforms", "cpu")  # this process only compares
    model, steps, every, sequences = (MODEL | NANO, 40, 10, 4) if dry else (MODEL, 160, 40, 16)
    trainer = {
        "num_train_steps": steps,
        "train_batch_size": sequences,
        "mp": "p=f32,c=bfloat16",
        "xla_options": {"xla_gpu_deterministic_ops": True},
        # a save waits for the previous one: the run cannot end before its first checkpoint is complete
        "checkpointer": {"save_interval": None, "keep": [{"every": every}]},
    }
    undisturbed, disturbed = Path("undisturbed"), Path("disturbed")
    other = start(undisturbed, model, trainer)
    killed_after = kill_after_a_checkpoint(disturbed, model, trainer, every)
    finish(disturbed, start(disturbed, model, trainer))
    finish(undisturbed, other)
    problems = differences(losses(disturbed), losses(undisturbed), steps)
    saved = arrays(disturbed, steps), arrays(undisturbed, steps)
    problems += different(*saved)
    row = {"steps": steps, "killed after step": killed_after, "arrays": len(saved[1]), "differences": len(problems)}
    yield Table(f"A run killed and resumed against an undisturbed one: {model['num_layers']} layers, bfloat16", [row])
    text = "; ".join(problems[:5]) or f"killed after step {killed_after}: {steps} losses and all arrays are the same"
    yield Verdict("resume", not problems, text)


def kill_after_a_checkpoint(folder: Path, model: dict[str, Any], trainer: dict[str, Any], step: int) -> int:
    """Start a run, and kill it once it has saved this step. -> the last step in its log"""
    process = start(folder, model, trainer)
    while not is_saved(folder, step):
        if process.poll() is not None:
            finish(folder, process)
            raise RuntimeError("the run ended before it could be killed")
        time.sleep(0.002)
    process.kill()
    process.wait()
    return max(number for number, _ in losses(folder))


def differences(found: list[tuple[int, float]], expected: list[tuple[int, float]], steps: int) -> list[str]:
    """What is wrong with the logged losses of the resumed run."""
    if [number for number, _ in found] != list(range(1, steps + 1)):
        return ["steps in the log are missing, repeated or out of order"]
    apart = [number for (number, loss), (_, other) in zip(found, expected, strict=True) if loss != other]
    return [f"losses differ from step {apart[0]} on"] if apart else []


def different(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [f"{name} differs" for name in names if found.get(name) != expected.get(name)]
