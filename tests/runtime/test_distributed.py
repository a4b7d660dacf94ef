"""Who else there is."""

import json
import os
import socket
import subprocess
import sys

import pytest

from lmtrain.config.errors import UserError
from lmtrain.runtime.config import DistributedConfig
from lmtrain.runtime.distributed import detects_others, start_processes
from lmtrain.runtime.processes import ALONE


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # an allocation, but not a step of several tasks
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "one"}, False),
        ({"TPU_WORKER_HOSTNAMES": "one,two"}, True),
        ({"PMI_SIZE": ""}, False),
    ],
)
def test_job_starters_say_whether_there_are_others(environment, several):
    assert detects_others(environment) == several


def test_without_settings_and_job_starter_a_process_is_alone_and_imports_no_jax():
    code = (
        "import sys; from lmtrain.runtime.config import DistributedConfig as C;"
        "from lmtrain.runtime.distributed import start_processes as s;"
        "p = s(C()); print(p.index, p.count, p.is_first, 'jax' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI", "TPU"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout.split() == ["0", "1", "True", "False"], done.stderr


def test_processes_that_cannot_meet_are_an_error_with_its_place(monkeypatch):
    import jax

    def refuse(**settings):
        assert settings["local_device_ids"] == [3]
        raise RuntimeError("Unable to initialize backend\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(
        UserError, match=r"^trainer\.distributed: the processes did not meet: Unable to initialize backend$"
    ):
        start_processes(DistributedConfig(num_processes=2, process_id=0, local_device_ids=3))


def test_two_processes_train_as_one_and_one_of_them_tells(settings, write_config, tmp_path):
    """Each on a device of its own; what there is one of is written once."""
    settings["trainer"] |= {"num_train_steps": 2, "steps_per_eval": 100}
    settings["data"]["validation_urls"] = None
    settings["model"] |= {"num_layers": 1, "gradient_checkpointing": False}
    config = write_config(settings)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def start(run, *flags):
        command = [sys.executable, "-m", "lmtrain", "train", str(config), "--trainer.id", run, *map(str, flags)]
        environment = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # what takes time is compiling
        }
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)

    def finish(process):
        told = process.communicate(timeout=120)[1]
        assert process.returncode == 0, told
        return told

    place = ["--trainer.distributed.coordinator_address", f"127.0.0.1:{port}", "--trainer.distributed.num_processes", 2]
    both = [start("both", *place, "--trainer.distributed.process_id", number) for number in range(2)]
    first, second = map(finish, both)
    assert "done: checkpoints in checkpoints/both" in first
    assert "loss" not in second

    lines = (tmp_path / "logs" / "both.metrics.jsonl").read_text().splitlines()
    assert [entry["step"] for entry in map(json.loads, lines) if "train/loss" in entry] == [1, 2]
    assert (tmp_path / "logs" / "both.process-1.log").exists()
    assert ALONE.is_first
