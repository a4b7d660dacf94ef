"""Detection of and connection to the other processes of a run."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from lmtrain.config.errors import UserError
from lmtrain.runtime.config import DistributedConfig
from lmtrain.runtime.distributed import detects_others, is_alone_on_its_node, start_processes
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
def test_launchers_say_whether_there_are_several_processes(environment, several):
    assert detects_others(environment) == several


@pytest.mark.parametrize(
    ("tasks", "node", "alone"),
    [
        ("1(x2)", "1", True),
        ("8(x2)", "0", False),
        ("2,1", "0", False),
        ("2,1", "1", True),
        ("1", "0", True),
        ("", "0", False),
    ],
)
def test_a_process_alone_on_its_slurm_node_is_detected(tasks, node, alone):
    assert is_alone_on_its_node({"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}) is alone


@pytest.mark.parametrize(
    ("variables", "settings", "ids"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, {}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, {}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, {"local_device_ids": 3}, [3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "JAX_LOCAL_DEVICE_IDS": "0,1"}, {}, None),
    ],
)
def test_a_process_alone_on_its_node_uses_all_devices(monkeypatch, variables, settings, ids):
    import jax

    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    given = {}

    def initialize(**keywords):
        given.update(keywords)
        raise RuntimeError("enough")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError):
        start_processes(DistributedConfig(**settings))
    assert given["local_device_ids"] == ids


def test_without_settings_and_launcher_there_is_one_process_and_jax_is_not_imported():
    code = (
        "import sys; from lmtrain.runtime.config import DistributedConfig as C;"
        "from lmtrain.runtime.distributed import start_processes as s;"
        "p = s(C()); print(p.index, p.count, p.is_first, 'jax' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI", "TPU"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout.split() == ["0", "1", "True", "False"], done.stderr


def test_a_failed_connection_is_an_error_with_the_name_of_the_section(monkeypatch):
    import jax

    def refuse(**settings):
        assert settings["local_device_ids"] == [3]
        raise RuntimeError("Unable to initialize backend\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match=r"^trainer\.distributed: .*: Unable to initialize backend$"):
        start_processes(DistributedConfig(num_processes=2, process_id=0, local_device_ids=3))


def write_random_export(settings, folder):
    """Write a Hugging Face model with these settings and random weights; returns its tensors."""
    from lmtrain.hf.export import write_export
    from lmtrain.hf.tokenizer import load_tokenizer
    from lmtrain.models.gpt2.config import Gpt2Config
    from lmtrain.models.registry import build_model
    from lmtrain.train.start.exporter import plan_export

    config = Gpt2Config(**settings["model"])
    tokenizer = load_tokenizer(settings["data"]["tokenizer"])
    plan = plan_export(config, build_model(config, tokenizer.vocab_size), tokenizer, "float32")
    rng = np.random.default_rng(0)
    tensors = {piece.name: rng.normal(size=piece.shape).astype(np.float32) * 0.1 for piece in plan.pieces}
    write_export(str(folder), plan, tensors.values())
    return tensors


@pytest.mark.long
def test_two_processes_train_together_and_only_the_first_logs(settings, write_config, tmp_path):
    """Each process has one device; files of the run are written once. With the tiny learning rate, the exported weights
    are still those of the initial Hugging Face model."""
    settings["trainer"] |= {"num_train_steps": 2, "steps_per_eval": 100}
    settings["data"]["validation_urls"] = None
    settings["model"] |= {"num_layers": 1, "gradient_checkpointing": False}
    settings["optimizer"]["learning_rate"] = 1e-9
    settings |= {"initialize_from_hf": "base", "hf_save_path": "exports"}
    base = write_random_export(settings, tmp_path / "base")
    config = write_config(settings)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def start(run, *flags):
        command = [sys.executable, "-m", "lmtrain", "train", str(config), "--trainer.id", run, *map(str, flags)]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def finish(process):
        log = process.communicate(timeout=300)[1]
        assert process.returncode == 0, log
        return log

    place = ["--trainer.distributed.coordinator_address", f"127.0.0.1:{port}", "--trainer.distributed.num_processes", 2]
    both = [start("both", *place, "--trainer.distributed.process_id", number) for number in range(2)]
    first, second = map(finish, both)
    assert "done: checkpoints in checkpoints/both" in first
    assert "loss" not in second

    lines = (tmp_path / "logs" / "both.metrics.jsonl").read_text().splitlines()
    assert [entry["step"] for entry in map(json.loads, lines) if "train/loss" in entry] == [1, 2]
    assert (tmp_path / "logs" / "both.process-1.log").exists()
    exported = load_file(tmp_path / "exports" / "both" / "step-2" / "model.safetensors")
    assert exported.keys() == base.keys()
    for name, tensor in base.items():
        np.testing.assert_allclose(exported[name], tensor, atol=1e-6, err_msg=name)
    assert ALONE.is_first
