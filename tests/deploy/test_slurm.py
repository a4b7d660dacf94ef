"""The batch scripts as far as they run without Slurm; tests/slurm runs them on real daemons."""

import os
import subprocess

from deploy.scripts import DEPLOY, ROOT

SLURM = DEPLOY / "slurm"
JOB = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


def test_a_mistake_ends_the_job_before_it_starts_processes(tmp_path):
    for given, named in (
        ({"PROCESSES": "gpu"}, "PROCESSES=gpu"),
        ({"PROCESSES": "gpus"}, "PROCESSES: "),
        ({"MAX_REQUEUES": "many"}, "MAX_REQUEUES: "),
    ):
        command = ["bash", SLURM / "train.sbatch", "my.yaml"]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | JOB | given, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert named in done.stderr


def test_secrets_are_nowhere_in_the_scripts():
    for file in SLURM.iterdir():
        assert "=$WANDB" not in file.read_text()
        assert "API_KEY=" not in file.read_text()
