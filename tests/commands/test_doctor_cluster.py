"""Detection of multi-process jobs by the variables that job launchers set."""

import pytest

from lmtrain.commands.doctor import look_at_cluster
from lmtrain.runtime.distributed import detects_others


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, "one; several hosts without Slurm or TPUs require trainer.distributed"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}, "one; "),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "Slurm: process 2 of 4"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI: process 0 of 2"),
        ({"PMI_SIZE": "3"}, "MPI: process ? of 3"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "3"},
            "TPU worker 3 of 4: start the same command on each",
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, "one; "),
    ],
)
def test_index_and_number_of_processes_are_those_that_a_run_would_use(environment, seen):
    (finding,) = look_at_cluster(environment)
    assert finding.seen.startswith(seen)
    assert finding.state == "ok"
    assert detects_others(environment) == (not seen.startswith("one; "))


def test_a_slurm_job_without_srun_is_noted():
    (finding,) = look_at_cluster({"SLURM_JOB_ID": "7"})
    assert finding.state == "note"
    assert "srun" in finding.fix


def test_a_run_id_that_all_runs_would_share_is_noted():
    assert list(look_at_cluster({"RUN_ID": "abc"}))[1].seen.startswith("abc, from RUN_ID")
