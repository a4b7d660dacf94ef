"""Reporting of a run: its trackers, its goodput ledger, its log folder, and what they say about it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax

from lmtrain.data.caches import Caches
from lmtrain.models.params import count_parameters
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import Run, run_identity
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.redact import find_secrets, redact
from lmtrain.sharding.axes import used_axes
from lmtrain.tracking.config import WandbConfig
from lmtrain.tracking.goodput import Ledger, Timer
from lmtrain.tracking.open import Trackers, open_trackers
from lmtrain.tracking.provenance import find_xla_dumps, git_facts
from lmtrain.train.program.compile import ModelFlops, layout_table
from lmtrain.train.program.program import Program
from lmtrain.weights.lora_base import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Trackers, ledger and timer of a run; `folder` is its log folder, and `facts` describe the run."""

    run: str
    folder: str
    facts: dict[str, Any]
    trackers: Trackers
    saves_xla_dumps: bool
    timer: Timer
    ledger: Ledger
    flops: ModelFlops

    def artifact(self, path: str, kind: str) -> None:
        """Pass a file or folder to the trackers that store artifacts."""
        self.trackers.artifact(path, f"{self.run}-{kind}", kind)

    def finish(self) -> None:
        """Pass the XLA dumps to the trackers, if they are to be saved, and finish the trackers."""
        if self.saves_xla_dumps and (dumps := find_xla_dumps()) is not None:
            self.artifact(dumps, "xla-dumps")
        self.trackers.finish()


def open_reporting(
    run: Run,
    program: Program,
    run_info: dict[str, Any],
    first_step: int,
    timer: Timer,
    ledger: Ledger,
    processes: Processes,
    write_files: Callable[[], None] = lambda: None,
) -> Reporting:
    """Reporting of a run that starts after `first_step` updates; only the first process has trackers.

    `write_files` writes the files of the log folder again, if it is removed during the run.
    """
    trainer, folder = program.config.trainer, run.logs
    logs = os.path.dirname(folder)
    trackers = Trackers()
    if processes.is_first:
        secrets = find_secrets(run.config.model_dump())
        trackers = open_trackers(trainer.tracker, logs, run.id, first_step, write_files, secrets)
    trackers.hyperparameters(run_info["config"] | {"data_tokens": run_info["identity"]["data_tokens"]})
    flops, parameters = model_flops(program), count_parameters(program.model)
    trackers.summary({"parameter_count": parameters, **device_summary(flops, program.config.model.seq_len)})
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    reporting = Reporting(
        run=run.id,
        folder=folder,
        facts={**run_info["machine"], "devices": devices, "parameters": parameters, "versions": run_info["versions"]},
        trackers=trackers,
        saves_xla_dumps=processes.is_first
        and any(isinstance(tracker, WandbConfig) and tracker.save_xla_dumps for tracker in trainer.tracker),
        timer=timer,
        ledger=ledger,
        flops=flops,
    )
    resolved_config = os.path.join(folder, "config.yaml")
    if os.path.exists(resolved_config):
        reporting.artifact(resolved_config, "config")
    return reporting


def model_flops(program: Program) -> ModelFlops:
    """FLOPs per token and peak FLOP/s of the devices; logs what MFU refers to."""
    full, causal = program.flops_per_token
    kind = jax.devices()[0].device_kind
    device = find_accelerator(kind)
    if device is None:
        log.info(f"unknown peak FLOP/s of {kind}: tokens per second are logged, MFU is not")
        return ModelFlops(full, causal, None)
    log.info(
        f"MFU: percent of {device.peak_flops / 1e12:,.0f} TFLOP/s ({device.name}, dense 16-bit products) per "
        "device; mfu counts full attention, mfu_causal half of it"
    )
    return ModelFlops(full, causal, device.peak_flops * jax.device_count())


def device_summary(flops: ModelFlops, seq_len: int) -> dict[str, Any]:
    """Values for the trackers' summary: FLOPs per example (forward and backward), theoretical FLOPs per second."""
    values = {
        "throughput/device_kind": jax.devices()[0].device_kind,
        "throughput/device_count": jax.device_count(),
        "throughput/flops_per_example": flops.flops_per_token * seq_len,
    }
    if flops.peak_flops is not None:
        values["throughput/theoretical_flops_per_device"] = flops.peak_flops / jax.device_count()
        values["throughput/theoretical_flops"] = flops.peak_flops
    return values


def log_program(program: Program) -> None:
    """Log the model, the layout of its parameters, and the memory of the training state."""
    config, model = program.config, program.model
    trained = ""
    if config.lora is not None:
        trained = f", of which LoRA trains {sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params)):,}"
    log.info(f"{config.model.type}, {count_parameters(model):,} parameters{trained}, {config.trainer.precision}")
    if config.trainer.precision.products and program.products and not program.experts_in_8_bits:
        log.info(
            f"  products of experts ({program.products.name}) have no 8 bits in {config.trainer.precision.products}"
        )
    moe = getattr(config.model, "moe", None)
    if moe is not None:
        log.info(
            f"  losses added for the routers: model.moe.aux_loss {moe.aux_loss:g}, model.moe.z_loss {moe.z_loss:g}"
        )
    if not config.objective.is_cross_entropy:  # a file that is included may have set some of it
        own = ", ".join(f"{name} {value}" for name, value in config.objective.model_dump(exclude={"type"}).items())
        log.info(f"  objective {config.objective.type}: {own}")
    for line in layout_table(model, program.layout, program.abstract.with_base(program.abstract.params)):
        log.info(f"  {line}")
    state = format_bytes(sum(program.state_bytes.values()))
    log.info(f"  training state: {state} per device; `lmtrain plan` compiles the step for its peak memory")
    if config.trainer.precision.params == "bfloat16":
        log.warning(
            "trainer.mp: parameters are stored in bfloat16: an update of less than 1/512 of a parameter is rounded "
            "away; p=f32,c=bfloat16 stores them in float32"
        )
    if config.objective.needs_reference and program.model.has_dropout:
        log.warning(
            f"objective {config.objective.type}: the model has dropout in training, its reference has none; set "
            "model.resid_pdrop, embed_pdrop and attn_pdrop, and lora.dropout, to 0.0, as TRL does"
        )


def describe_run(
    config: RunConfig,
    run: str,
    tokenizer: dict[str, Any],
    caches: Caches,
    program: Program,
    frozen: Mapping[str, LoadedModel] | None = None,
) -> dict[str, Any]:
    """The run info that is stored in every checkpoint next to the arrays. `frozen` are the models that are not trained,
    by name."""
    # with dropout, the masks depend on the number of microbatches
    microbatches = {str(size): number for size, number in program.batching.num_microbatches.items()}
    return {
        "run_id": run,
        "identity": run_identity(config, tokenizer, caches.identity),
        "config": resolved(config),
        "machine": {
            "device": jax.devices()[0].device_kind,
            # as in checkpoints from before there were more axes
            "mesh": used_axes(program.layout.mesh.shape),
            "microbatches": microbatches,
            "xla_options": program.xla_options,
        },
        **{name: redact(each.run_info) for name, each in (frozen or {}).items()},
        "git": git_facts(),
        "versions": {name: version(name) for name in ("lmtrain", "jax", "flax", "optax", "orbax-checkpoint")},
    }
