"""Whether this would be one process of several, as JAX's detection and lmtrain's start-up see it."""

import os
from collections.abc import Iterator, Mapping

from lmtrain.doctor.finding import Finding, State
from lmtrain.runtime.distributed import JOB_STARTERS, detects_others


def look_at_cluster(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether this is one process of several, and how they would find one another."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        worker = environment.get("TPU_WORKER_ID", "?")
        yield Finding("processes", f"TPU worker {worker} of {len(hosts.split(','))}: start the same command on each")
        return
    for starter, (count, index) in JOB_STARTERS.items():
        number = environment.get(count, "")
        if number.isdigit() and int(number) > 1:
            yield Finding("processes", f"{starter}: process {environment.get(index, '?')} of {number}")
            return
    if detects_others(environment):
        yield Finding("processes", "one of several, by its environment")
    elif "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        yield Finding(
            "processes",
            f"one: within Slurm job {environment['SLURM_JOB_ID']}, but not started by srun",
            State.NOTE,
            "`srun lmtrain train CONFIG` starts one on each node; see deploy/slurm",
        )
    else:
        yield Finding("processes", "one; several hosts without Slurm or TPUs need trainer.distributed")
    if environment.get("RUN_ID"):
        yield Finding("run id", f"{environment['RUN_ID']}, from RUN_ID: every run here continues this one", State.NOTE)
