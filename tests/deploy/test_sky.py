"""deploy/sky: valid for SkyPilot's own parser; its script starts one process on each node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deploy.scripts import BIN, DEPLOY, ROOT, shellcheck

TASK = yaml.safe_load((DEPLOY / "sky" / "train.yaml").read_text())
SKYPILOT = "skypilot==0.14.1"


def test_its_clean_script_starts_on_every_node_the_process_of_its_rank(tmp_path, run_cli, write_config):
    shellcheck("--shell=bash", "-", text=TASK["run"])
    program = tmp_path / ".venv" / "bin" / "lmtrain"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$RUN_ID $*"\n')
    program.chmod(0o755)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    given = TASK["envs"] | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    for rank in range(2):
        environment = os.environ | given | {"SKYPILOT_NODE_RANK": str(rank)}
        command = ["bash", "-c", TASK["run"]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        run_id, verb, config, *flags = done.stdout.split()
        assert (run_id, verb, config) == ("my-run", "train", TASK["envs"]["CONFIG"]), done.stderr
        assert flags[-6:] == [
            *("--trainer.distributed.coordinator_address", "10.0.0.1:5789"),
            *("--trainer.distributed.num_processes", "2"),
            *("--trainer.distributed.process_id", str(rank)),
        ]
    write_config({"data": {"train_urls": ["x.jsonl"], "tokenizer": "byte"}})
    run_cli("config", "check", "tiny.yaml", *flags, code=0)


CHECK = """
import sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.accelerators, resources.use_spot, resources.job_recovery)
"""


@pytest.mark.long
def test_skypilot_accepts_the_file(tmp_path: Path):
    """SkyPilot in an environment of its own: it would limit the versions of other packages."""
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    python = tmp_path / "sky" / "bin" / "python"
    for command in (
        [BIN / "uv", "venv", "-q", "--python", sys.executable, tmp_path / "sky"],
        [BIN / "uv", "pip", "install", "-q", "--python", python, SKYPILOT],
    ):
        subprocess.run(list(map(str, command)), check=True, timeout=300)
    command = [str(python), "-c", CHECK, str(DEPLOY / "sky" / "train.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 {'H100': 8} True {")
    assert "'recover_on_exit_codes': [75]" in done.stdout
