"""Which jobs Slurm starts again, with which run id and GPUs, and the arrays of a ladder."""

import json
import re
import signal
from pathlib import Path

import pytest
from conftest import run_in_process, tiny_settings
from deploy.scripts import shellcheck
from faults.runs import write_config
from slurm.cluster import Cluster

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

pytestmark = pytest.mark.long

ONE_NODE = ("--gpus-per-node=0",)
FEW_CORES = ("--cpus-per-task=2",)
scripts = pytest.mark.parametrize(("script", "options"), [("train.sbatch", ONE_NODE), ("preprocess.sbatch", FEW_CORES)])


def programs(cluster: Cluster, folder: Path, code: str) -> dict[str, str]:
    """The environment of an `lmtrain` that runs this Python code; `start` counts its starts by Slurm from 0."""
    return cluster.with_lmtrain(
        folder, f'import os, sys\nstart = int(os.environ.get("SLURM_RESTART_COUNT", 0))\n{code}'
    )


def exits(cluster: Cluster, folder: Path, *codes: int) -> dict[str, str]:
    """An `lmtrain` that ends with these codes in order, -N by signal N, and records RUN_ID and its arguments."""
    return programs(
        cluster,
        folder,
        'open("seen.txt", "a").write(os.environ.get("RUN_ID", "") + " " + " ".join(sys.argv[1:]) + "\\n")\n'
        f"code = {list(codes)}[start]\n"
        "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)\n",
    )


def starts(folder: Path) -> list[str]:
    return (folder / "seen.txt").read_text().splitlines()


def ended(cluster, job: int) -> tuple[str, str, str]:
    """-> state, exit code, number of requeues"""
    state = cluster.wait(job)
    return state, cluster.field(job, "ExitCode").partition(":")[0], cluster.field(job, "Restarts")


def test_a_job_is_requeued_after_what_a_restart_can_resume(cluster, folder):
    codes = (STOPPED_BY_SIGNAL, 1, -signal.SIGABRT, -signal.SIGKILL, -signal.SIGUSR1, 0)
    environment = exits(cluster, folder, *codes)
    job = cluster.submit(folder, "train.sbatch", "my.yaml", "--a.b", "c d", options=ONE_NODE, **environment)
    assert ended(cluster, job) == ("COMPLETED", "0", "5")
    printed = (folder / f"slurm-{job}.out").read_text()
    found = re.findall(r"exit (\d+), requeue (\d) of at most 20", printed)
    # death by the signal before the time limit, before Python handles it, is a clean stop
    assert found == [("75", "1"), ("1", "2"), ("134", "3"), ("137", "4"), ("75", "5")]
    assert starts(folder) == [f"slurm-{job} train my.yaml --a.b c d"] * 6


@scripts
def test_requeues_are_limited_and_the_run_id_can_be_chosen(cluster, folder, script, options):
    environment = exits(cluster, folder, STOPPED_BY_SIGNAL, 1) | {"MAX_REQUEUES": "1", "RUN_ID": "mine"}
    job = cluster.submit(folder, script, "my.yaml", options=options, **environment)
    assert ended(cluster, job) == ("FAILED", "1", "1")
    assert "exit 1 after 1 requeues, MAX_REQUEUES is 1: not requeued" in (folder / f"slurm-{job}.out").read_text()
    assert starts(folder) == [f"mine {script.partition('.')[0]} my.yaml"] * 2


@scripts
def test_a_mistake_is_not_requeued(cluster, folder, script, options):
    """Also if only one process finds it: Slurm reports the highest exit code."""
    code = 'sys.exit(2 if os.environ["SLURM_PROCID"] == "0" else 1)\n'
    nodes = ("--nodes=2",) if script == "train.sbatch" else ()
    job = cluster.submit(folder, script, "my.yaml", options=(*options, *nodes), **programs(cluster, folder, code))
    assert ended(cluster, job) == ("FAILED", "2", "0")


DEVICES = """
import jax
from lmtrain.run.execution import DistributedConfig
from lmtrain.runtime.distributed import start_processes
start_processes(DistributedConfig())
gpus = jax.config.read("jax_cuda_visible_devices")
line = f"process {jax._src.distributed.global_state.process_id} has {gpus} of {os.environ['CUDA_VISIBLE_DEVICES']}"
open(line, "w").close()
"""


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        # JAX alone would give each process only the first
        (("--nodes=2", "--gpus-per-node=2"), {}, ["process 0 has all of 0,1", "process 1 has all of 0,1"]),
        (("--gpus-per-node=2",), {"PROCESSES": "gpu"}, ["process 0 has 0 of 0,1", "process 1 has 1 of 0,1"]),
    ],
)
def test_every_gpu_has_a_process(cluster, folder, options, environment, expected):
    found = programs(cluster, folder, DEVICES)
    job = cluster.submit(folder, "train.sbatch", "my.yaml", options=options, MAX_REQUEUES="0", **found, **environment)
    assert cluster.wait(job) == "COMPLETED", (folder / f"slurm-{job}.out").read_text()
    assert sorted(path.name for path in folder.glob("process *")) == expected


def submit_ladder(cluster, folder: Path, environment: dict[str, str], **changes: object) -> list[int]:
    """Write the arrays of a ladder of one size, and submit them. -> the ids of the arrays"""
    settings = tiny_settings()
    settings["trainer"] |= {"steps_per_eval": 50, "max_eval_batches": 2}
    del settings["trainer"]["num_train_steps"]
    write_config(folder, settings)
    sizes = {"hidden_dim": 16, "num_heads": 2, "num_layers": 1}
    ladder = {"config": "tiny.json", "sizes": [sizes], "tokens_per_parameter": [1, 2], **changes}
    (folder / "ladder.yaml").write_text(json.dumps(ladder))
    done = run_in_process(["scaling", "run", "ladder.yaml", "--slurm", "jobs"], folder, code=0)
    assert done.stdout == "run: bash jobs/submit.sh [OPTIONS OF SBATCH]\n"
    shellcheck(folder / "jobs/submit.sh")
    printed = cluster.call("bash", "jobs/submit.sh", *ONE_NODE, cwd=folder, **environment)
    return [int(line) for line in re.findall(r"^array (\d+): 1 run$", printed, re.MULTILINE)]


def test_the_arrays_of_a_ladder_start_its_runs_in_order(cluster, folder):
    code = 'open("seen.txt", "a").write(" ".join(sys.argv[1:]) + "\\n")\nsys.exit([75, 0][start])\n'
    arrays = submit_ladder(cluster, folder, programs(cluster, folder, code))
    assert [ended(cluster, array) for array in arrays] == [("COMPLETED", "0", "1")] * 2
    longest, again, branch, _ = [line.split() for line in starts(folder)]
    assert longest == again
    assert "--trainer.id=ladder-16x1-2x-lr0.01-seed0" in longest
    assert any(word.startswith("--trainer.initialize_from=") for word in branch)


def test_runs_that_need_a_failed_one_do_not_start(cluster, folder):
    first, second = submit_ladder(cluster, folder, exits(cluster, folder, 2))
    assert ended(cluster, first) == ("FAILED", "2", "0")
    cluster.until(second, lambda: cluster.field(second, "Reason") == "DependencyNeverSatisfied")
    assert len(starts(folder)) == 1


@pytest.mark.end_to_end
def test_the_arrays_of_a_ladder_train_its_runs(cluster, folder):
    arrays = submit_ladder(cluster, folder, {})
    assert [ended(cluster, array) for array in arrays] == [("COMPLETED", "0", "0")] * 2
    status = run_in_process(["scaling", "status", "ladder.yaml"], folder, code=0)
    assert status.stdout.endswith("complete\n"), status.stdout
