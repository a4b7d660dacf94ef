"""Reporting of a run: its trackers, its goodput ledger, its log folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from lmtrain.config.redact import find_secrets
from lmtrain.models.params import count_parameters
from lmtrain.run.run import Run
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import Processes
from lmtrain.tracking.goodput import Ledger
from lmtrain.tracking.open import Trackers, open_trackers
from lmtrain.tracking.provenance import Provenance
from lmtrain.tracking.timer import Timer
from lmtrain.train.program.mfu import ModelFlops
from lmtrain.train.program.program import Program


@dataclass(frozen=True)
class Reporting:
    """Trackers, ledger and timer of a run; `folder` is its log folder. `title` and `facts` describe the run."""

    run: str
    folder: str
    title: str
    facts: dict[str, Any]
    trackers: Trackers
    provenance: Provenance
    timer: Timer
    ledger: Ledger
    flops: ModelFlops

    def artifact(self, path: str, kind: str) -> None:
        """Pass a file or folder to the trackers that store artifacts."""
        self.trackers.artifact(path, f"{self.run}-{kind}", kind)


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
    trackers = (
        open_trackers(trainer.tracker, logs, run.id, first_step, write_files) if processes.is_first else Trackers()
    )
    trackers.hyperparameters(run_info["config"] | {"data_tokens": run_info["identity"]["data_tokens"]})
    flops, parameters = model_flops(program), count_parameters(program.model)
    trackers.summary({"parameter_count": parameters, **device_summary(flops, program.config.model.seq_len)})
    secrets = find_secrets(run.config.model_dump())
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    reporting = Reporting(
        run=run.id,
        folder=folder,
        title=f"{run.id}  {program.config.model.type}, {parameters:,} parameters, {devices}",
        facts={**run_info["machine"], "devices": devices, "parameters": parameters, "versions": run_info["versions"]},
        trackers=trackers,
        provenance=Provenance(trainer.tracker if processes.is_first else [], folder, run.id, trackers, secrets),
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
