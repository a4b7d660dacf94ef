"""Reporting of a run: its trackers, its goodput ledger, its log folder."""

import os
from dataclasses import dataclass
from typing import Any

import jax

from lmtrain.models.params import count_parameters
from lmtrain.run.run import Run
from lmtrain.runtime.processes import Processes
from lmtrain.tracking.goodput import Ledger
from lmtrain.tracking.open import Trackers, open_trackers
from lmtrain.tracking.provenance import Provenance
from lmtrain.tracking.timer import Timer
from lmtrain.train.program.program import Program
from lmtrain.train.program.work import Work
from lmtrain.train.start.facts import device_facts, plan_work


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
    work: Work

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
) -> Reporting:
    """Reporting of a run that starts after `first_step` updates; only the first process has trackers."""
    trainer, folder = program.config.trainer, run.logs
    logs = os.path.dirname(folder)
    trackers = open_trackers(trainer.tracker, logs, run.id, first_step) if processes.is_first else Trackers()
    trackers.hyperparameters(run_info["config"] | {"data_tokens": run_info["identity"]["data_tokens"]})
    work, parameters = plan_work(program), count_parameters(program.model)
    trackers.summary({"parameter_count": parameters, **device_facts(work, program.config.model.seq_len)})
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    reporting = Reporting(
        run=run.id,
        folder=folder,
        title=f"{run.id}  {program.config.model.type}, {parameters:,} parameters, {devices}",
        facts={**run_info["machine"], "devices": devices, "parameters": parameters, "versions": run_info["versions"]},
        trackers=trackers,
        provenance=Provenance(trainer.tracker if processes.is_first else [], folder, run.id, trackers),
        timer=timer,
        ledger=ledger,
        work=work,
    )
    resolved_config = os.path.join(folder, "config.yaml")
    if os.path.exists(resolved_config):
        reporting.artifact(resolved_config, "config")
    return reporting
