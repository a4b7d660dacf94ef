"""Description of a run for its log, its checkpoints and its trackers."""

from importlib.metadata import version
from typing import Any

import jax

from lmtrain.data.caches import Caches
from lmtrain.models.params import count_parameters
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.identity import run_identity
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program.layout_table import layout_table
from lmtrain.train.program.program import Program
from lmtrain.train.program.work import Work
from lmtrain.train.start.base import BASE, Base


def log_program(program: Program) -> None:
    """Log the model, the layout of its parameters, and the memory of the training state."""
    config, model = program.config, program.model
    trained = ""
    if program.abstract.base is not None:
        trained = f", of which LoRA trains {sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params)):,}"
    log.info(f"{config.model.type}, {count_parameters(model):,} parameters{trained}, {config.trainer.precision}")
    for line in layout_table(model, program.layout, config.trainer.precision.params, config.base_dtype):
        log.info(f"  {line}")
    state = format_bytes(sum(program.state_bytes.values()))
    log.info(f"  training state: {state} per device; `lmtrain plan` estimates the peak memory")


def describe_run(
    config: RunConfig,
    run: str,
    tokenizer: dict[str, Any],
    caches: Caches,
    program: Program,
    base: Base | None = None,
) -> dict[str, Any]:
    """The run info that is stored in every checkpoint next to the arrays. `base` of a run with LoRA."""
    # with dropout, the masks depend on the number of microbatches
    microbatches = {str(size): number for size, number in program.batching.num_microbatches.items()}
    return {
        "run_id": run,
        "identity": run_identity(config, tokenizer, caches.identity),
        "config": resolved(config),
        "machine": {
            "device": jax.devices()[0].device_kind,
            "mesh": dict(program.layout.mesh.shape),
            "microbatches": microbatches,
            "xla_options": program.xla_options,
        },
        **({} if base is None else {BASE: base.run_info}),
        "versions": {name: version(name) for name in ("lmtrain", "jax", "flax", "optax", "orbax-checkpoint")},
    }


def plan_work(program: Program) -> Work:
    """FLOPs per token and peak FLOP/s of the devices; logs what MFU refers to."""
    full, causal = program.flops_per_token
    kind = jax.devices()[0].device_kind
    device = find_accelerator(kind)
    if device is None:
        log.info(f"unknown peak FLOP/s of {kind}: tokens per second are logged, MFU is not")
        return Work(full, causal, None)
    log.info(
        f"MFU: percent of {device.peak_flops / 1e12:,.0f} TFLOP/s ({device.name}, dense 16-bit products) per "
        "device; mfu counts full attention, mfu_causal half of it"
    )
    return Work(full, causal, device.peak_flops * jax.device_count())


def device_facts(work: Work, seq_len: int) -> dict[str, Any]:
    """Values for the trackers' summary: FLOPs per example (forward and backward), theoretical FLOPs per second."""
    facts = {
        "throughput/device_kind": jax.devices()[0].device_kind,
        "throughput/device_count": jax.device_count(),
        "throughput/flops_per_example": work.flops_per_token * seq_len,
    }
    if work.peak_flops is not None:
        facts["throughput/theoretical_flops_per_device"] = work.peak_flops / jax.device_count()
        facts["throughput/theoretical_flops"] = work.peak_flops
    return facts
