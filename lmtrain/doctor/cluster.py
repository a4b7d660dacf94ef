"""Detection of multi-process jobs, as in JAX and in lmtrain's start-up."""

import os
from collections.abc import Iterator, Mapping

from lmtrain.doctor.finding import Finding
from lmtrain.runtime.distributed import JOB_STARTERS, detects_others


def look_at_cluster(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether this is one process of several, and how the processes would find each other."""
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
        yield Finding("processes", "one of several, according to environment variables")
    elif "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        seen = f"one: inside Slurm job {environment['SLURM_JOB_ID']}, but not started by srun"
        yield Finding(
            "processes", seen, "note", "`srun lmtrain train CONFIG` starts one on each node; see deploy/slurm"
        )
    else:
        yield Finding("processes", "one; several hosts without Slurm or TPUs require trainer.distributed")
    if environment.get("RUN_ID"):
        yield Finding(
            "run id", f"{environment['RUN_ID']}, from RUN_ID: every run in this environment resumes it", "note"
        )
