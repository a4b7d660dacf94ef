"""The batch scripts on a real Slurm: time limits, kills and cancelled jobs, each equal to an undisturbed run."""

import os
import signal
from pathlib import Path

import pytest
from conftest import log_lines, logged, tiny_settings
from faults.runs import last_logged, output_of, write_config
from forked import ended
from multihost.processes import start_run
from slurm.cluster import Cluster

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

pytestmark = [pytest.mark.long, pytest.mark.end_to_end]

STEPS = 60
HELD = Path(__file__).parent / "held_lmtrain.py"
TWO_NODES = ("--nodes=2", "--gpus-per-node=0")  # of any machine: processes use the CPU


def settings(cache: Path) -> dict:
    plain = tiny_settings()
    plain["data"]["cache_dir"] = str(cache)
    plain["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 30}
    plain["trainer"]["checkpointer"] = {"save_interval": None, "keep": [{"every": 25}]}
    return plain


def losses(folder: Path, job: int) -> list[dict]:
    """The metrics of the run of a job by step, without times."""
    names = ("step", "train/loss", "eval/loss", "train/gradient_norm")
    found = [{name: line[name] for name in names if name in line} for line in log_lines(folder, f"slurm-{job}")]
    return [line for line in found if len(line) > 1]


def output(folder: Path, job: int) -> str:
    return (folder / f"slurm-{job}.out").read_text()


@pytest.fixture(scope="module")
def cache(_running: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a job has written."""
    folder = tmp_path_factory.mktemp("preprocessed")
    write_config(folder, settings(folder / "cache"))
    job = _running.submit(folder, "preprocess.sbatch", "tiny.json", options=("--cpus-per-task=2",))
    assert _running.wait(job) == "COMPLETED", output(folder, job)
    return folder / "cache"


@pytest.fixture
def config(cache: Path, folder: Path) -> str:
    write_config(folder, settings(cache))
    return "tiny.json"


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The metrics of an uninterrupted run of two processes, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, settings(cache))
    with ended(*start_run(folder, "slurm-0", 2, devices=1)) as processes:
        for process in processes:
            output_of(process, 0)
    assert list(logged(folder, "train/loss", "slurm-0")) == list(range(1, STEPS + 1))
    return losses(folder, 0)


def hold(folder: Path, step: int) -> None:
    """Let the run wait at this step: the speed of the machine decides nothing."""
    (folder / "new").write_text(str(step))
    (folder / "new").rename(folder / "hold")


def test_a_run_through_its_time_limit_and_a_killed_process_equals_an_undisturbed_one(
    cluster, undisturbed, config, folder
):
    held = cluster.with_lmtrain(folder, HELD.read_text())
    hold(folder, 5)
    job = cluster.submit(
        folder, "train.sbatch", config, options=(*TWO_NODES, "--time=1000", "--signal=USR1@3600"), **held
    )
    run = f"slurm-{job}"
    cluster.until(job, lambda: last_logged(folder, run) >= 3)
    # From now on the signal is due; it comes when Slurm looks at time limits, every half minute.
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    cluster.until(job, lambda: "requeue 1 of" in output(folder, job))
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=1000")  # the next start is not signalled
    stopped_at = last_logged(folder, run)
    hold(folder, stopped_at + 5)
    cluster.until(job, lambda: last_logged(folder, run) >= stopped_at + 3)
    os.kill(cluster.tasks(job)[1], signal.SIGKILL)
    cluster.until(job, lambda: "requeue 2 of" in output(folder, job))
    (folder / "hold").unlink()
    assert cluster.wait(job) == "COMPLETED", output(folder, job)
    assert cluster.field(job, "Restarts") == "2"
    printed = output(folder, job)
    assert f"exit {STOPPED_BY_SIGNAL}, requeue 1 of" in printed
    assert f"resuming after step {stopped_at}" in printed  # the signal loses no step
    assert losses(folder, job) == undisturbed


def test_a_cancelled_job_is_not_requeued_and_another_job_finishes_its_run(cluster, undisturbed, config, folder):
    hold(folder, 5)
    held = cluster.with_lmtrain(folder, HELD.read_text())
    job = cluster.submit(folder, "train.sbatch", config, options=TWO_NODES, **held)
    run = f"slurm-{job}"
    cluster.until(job, lambda: last_logged(folder, run) >= 3)
    cluster.call("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    assert cluster.field(job, "Restarts") == "0"
    stopped_at = last_logged(folder, run)
    assert stopped_at < STEPS
    again = cluster.submit(folder, "train.sbatch", config, options=TWO_NODES, RUN_ID=run)
    assert cluster.wait(again) == "COMPLETED", output(folder, again)
    assert f"resuming after step {stopped_at}" in output(folder, again)
    assert losses(folder, job) == undisturbed


@pytest.mark.release  # test_requeue.py has a process for each GPU, tests/multihost the losses of more processes
def test_a_process_per_gpu_trains_as_a_process_per_node(cluster, cache, folder):
    found = []
    few = settings(cache)
    few["trainer"] |= {"num_train_steps": 10, "steps_per_eval": 5}
    for processes, devices in (("gpu", 1), ("node", 2)):
        where = folder / processes
        write_config(where, few)
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        options = ("--nodes=2", "--gpus-per-node=2")
        job = cluster.submit(where, "train.sbatch", "tiny.json", options=options, PROCESSES=processes, XLA_FLAGS=flags)
        assert cluster.wait(job) == "COMPLETED", output(where, job)
        found.append(losses(where, job))
    assert found[0] == found[1]


def test_a_mistake_in_the_config_is_not_requeued(cluster, cache, folder):
    write_config(folder, settings(cache) | {"modell": {}})
    job = cluster.submit(folder, "train.sbatch", "tiny.json", options=TWO_NODES)
    assert cluster.wait(job) == "FAILED"
    assert (cluster.field(job, "ExitCode"), cluster.field(job, "Restarts")) == ("2:0", "0")
    assert "modell" in output(folder, job)
