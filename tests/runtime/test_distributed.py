"""Detection of and connection to the other processes of a run."""

import os
import subprocess
import sys

import pytest

from lmtrain.run.execution import DistributedConfig
from lmtrain.runtime.distributed import detects_others, is_alone_on_its_node, start_processes
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # an allocation, but not a step of several tasks
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "one,two"}, True),
    ],
)
def test_launchers_say_whether_there_are_several_processes(environment, several):
    assert detects_others(environment) == several


@pytest.mark.parametrize(
    ("tasks", "node", "alone"), [("1(x2)", "1", True), ("2,1", "0", False), ("2,1", "1", True), ("", "0", False)]
)
def test_a_process_alone_on_its_slurm_node_is_detected(tasks, node, alone):
    assert is_alone_on_its_node({"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}) is alone


@pytest.mark.parametrize(
    ("variables", "settings", "ids"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, {}, []),
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
        raise RuntimeError("Unable to initialize backend\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match=r"^trainer\.distributed: .*: Unable to initialize backend$"):
        start_processes(DistributedConfig(**settings))
    assert given["local_device_ids"] == ids


def test_without_settings_and_launcher_there_is_one_process_and_jax_is_not_imported():
    code = (
        "import sys; from lmtrain.run.execution import DistributedConfig as C;"
        "from lmtrain.runtime.distributed import start_processes as s;"
        "p = s(C()); print(p.index, p.count, p.is_first, 'jax' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI", "TPU"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout.split() == ["0", "1", "True", "False"], done.stderr


@pytest.mark.parametrize(("settings", "refused"), [({}, True), ({"num_processes": 1}, False)])
def test_torchrun_and_accelerate_are_refused_unless_the_processes_are_named(monkeypatch, settings, refused):
    import jax

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(jax.distributed, "initialize", lambda **keywords: 1 / 0)
    with pytest.raises(UserError if refused else ZeroDivisionError, match="torchrun" if refused else "division"):
        start_processes(DistributedConfig(**settings))
