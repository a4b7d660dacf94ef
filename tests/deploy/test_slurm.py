"""The batch scripts under a fake Slurm: two real processes signalled and requeued; requeued exit codes."""

import json
import os
import socket
import subprocess
import sys

import pytest
from conftest import tiny_settings
from deploy.fake_slurm import install, warn
from deploy.scripts import DEPLOY, ROOT, blocks, needs, shellcheck
from faults.runs import end, wait_for, write_config

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

SLURM = DEPLOY / "slurm"
STEPS = 60


def test_shell_scripts_are_clean():
    shellcheck(*SLURM.glob("*.sbatch"), *SLURM.glob("*.sh"))


def job_with_free_port() -> int:
    """A job id whose port is free: JAX derives the coordinator's port from the job id."""
    for port in range(61440 + os.getpid() % 1000, 65536):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return 7 * 4096 + port - 61440
    raise AssertionError("no free port")


@pytest.fixture
def slurm(tmp_path):
    """`slurm.start("train.sbatch", ...)` submits from `slurm.folder`."""
    return Slurm(tmp_path)


class Slurm:
    def __init__(self, folder):
        self.folder, self.state = folder, folder / "slurm"
        self.state.mkdir()
        self.job = job_with_free_port()
        self.environment = install(self.state, self.job) | {"REPOSITORY": str(ROOT)}

    def start(self, script, *arguments, options=(), **environment):
        command = ["sbatch", *options, SLURM / script, *arguments]
        with open(self.folder / "output.txt", "a") as output:
            return subprocess.Popen(
                list(map(str, command)),
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | self.environment | environment,
            )

    def run(self, *arguments, **keywords):
        """-> exit code, output"""
        process = self.start(*arguments, **keywords)
        try:
            code = process.wait(timeout=300)
        finally:
            end([process])
        return code, (self.folder / "output.txt").read_text()

    @property
    def steps(self):
        """The options of every srun."""
        return [json.loads(line) for line in (self.state / "steps.jsonl").read_text().splitlines()]

    def fake_lmtrain(self, program):
        """Put an `lmtrain` before the real one on the PATH. `program` is Python; `start` is the number of its srun."""
        counted = f'import os, sys, json\nstart = len(open("{self.state}/steps.jsonl").readlines())\n'
        file = self.state / "bin" / "lmtrain"
        file.write_text(f"#!{sys.executable}\n{counted}{program}")
        file.chmod(0o755)

    def exits(self, *codes):
        """An `lmtrain` that exits with these codes in order, and records RUN_ID and its arguments."""
        self.fake_lmtrain(
            'open("seen.txt", "a").write(os.environ.get("RUN_ID", "") + " " + " ".join(sys.argv[1:]) + "\\n")\n'
            f"code = {list(codes)}[start - 1]\n"
            "os.abort() if code == 134 else sys.exit(code)\n"
        )
        return len(codes)


def of_two(slurm):
    """The metrics of a run of two processes by step, without times."""
    run = f"slurm-{slurm.job}"
    lines = (slurm.folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()
    names = ("step", "train/loss", "eval/loss", "train/gradient_norm")
    found = [{name: line[name] for name in names if name in line} for line in map(json.loads, lines)]
    return [line for line in found if len(line) > 1]


@pytest.mark.end_to_end
@pytest.mark.long
def test_two_processes_signalled_and_requeued_equal_an_uninterrupted_pair(tmp_path):
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 30, "id": None}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": []}
    two_nodes = ("--nodes", "2", "--gpus-per-node", "0")  # one process on each, without GPUs
    found = {}
    for name in ("uninterrupted", "signalled"):
        folder = tmp_path / name
        write_config(folder, settings)
        slurm = found[name] = Slurm(folder)
        process = slurm.start("train.sbatch", "tiny.json", options=two_nodes)
        try:
            if name == "signalled":
                log = folder / "logs" / f"slurm-{slurm.job}.metrics.jsonl"
                wait_for(lambda log=log: log.exists() and log.read_text().count("train/loss") > 3, [process])
                warn(slurm.state)
            code = process.wait(timeout=300)
        finally:
            end([process])
        assert code == 0, (folder / "output.txt").read_text()
    output = (tmp_path / "signalled" / "output.txt").read_text()
    assert f"exit {STOPPED_BY_SIGNAL}, requeue 1 of" in output
    assert "resuming after step" in output
    assert [len(found[name].steps) for name in ("uninterrupted", "signalled")] == [1, 2]
    assert found["signalled"].steps[0]["ntasks"] == "2"
    logged = of_two(found["signalled"])
    assert [line["step"] for line in logged if "train/loss" in line] == list(range(1, STEPS + 1))
    assert logged == of_two(found["uninterrupted"])


@pytest.mark.parametrize("script", ["train.sbatch", "preprocess.sbatch"])
@pytest.mark.parametrize("code", [75, 134, 1, 137])
def test_what_a_restart_can_resume_is_requeued(slurm, script, code):
    slurm.exits(code, 0)
    assert slurm.run(script, "my.yaml", "--a.b", "c d")[0] == 0
    assert len(slurm.steps) == 2


@pytest.mark.parametrize("script", ["train.sbatch", "preprocess.sbatch"])
@pytest.mark.parametrize("code", [0, 2])
def test_success_and_mistakes_are_not_requeued(slurm, script, code):
    slurm.exits(code, 1)
    assert slurm.run(script, "my.yaml")[0] == code
    assert len(slurm.steps) == 1


def test_requeues_are_limited(slurm):
    slurm.exits(1, 75, 134, 1)
    code, output = slurm.run("train.sbatch", "my.yaml", MAX_REQUEUES="2")
    assert code == 134
    assert len(slurm.steps) == 3
    assert "after 2 requeues, MAX_REQUEUES is 2: not requeued" in output


def test_requeues_by_slurm_count_too(slurm):
    slurm.exits(1, 1, 1)
    assert slurm.run("train.sbatch", "my.yaml", SLURM_RESTART_COUNT="19")[0] == 1
    assert len(slurm.steps) == 2


def seen(slurm):
    return (slurm.folder / "seen.txt").read_text().splitlines()


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"RUN_ID": "mine"}, "mine")])
def test_the_run_id_stays_the_same_after_requeues(slurm, given, expected):
    slurm.exits(75, 134, 0)
    assert slurm.run("train.sbatch", "my.yaml", "--a.b=c", **given)[0] == 0
    assert seen(slurm) == [f"{expected or f'slurm-{slurm.job}'} train my.yaml --a.b=c"] * 3


DEVICES = """
import jax
from lmtrain.runtime.config import DistributedConfig
from lmtrain.runtime.distributed import start_processes
start_processes(DistributedConfig())
gpus = jax.config.read("jax_cuda_visible_devices")
line = f"process {jax._src.distributed.global_state.process_id} has {gpus}"
os.write(1, (line + "\\n").encode())  # in one piece, so that lines of two processes do not mix
"""


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        # one process for each of two nodes with four GPUs: JAX alone would give each only the first
        ({}, ("--nodes=2", "--gpus-per-node=4"), ["process 0 has all", "process 1 has all"]),
        pytest.param(
            *({"PROCESSES": "gpu"}, ("--gpus-per-node=2",), ["process 0 has 0", "process 1 has 1"]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_gpu_has_a_process(slurm, environment, options, expected):
    slurm.fake_lmtrain(DEVICES)
    code, output = slurm.run("train.sbatch", "my.yaml", options=options, MAX_REQUEUES="0", **environment)
    assert code == 0, output
    assert sorted(line for line in output.splitlines() if " has " in line) == expected


def test_a_process_per_gpu_without_gpus_is_a_mistake(slurm):
    code, output = slurm.run("train.sbatch", "my.yaml", options=("--gpus-per-node", "0"), PROCESSES="gpu")
    assert (code, "needs GPUs" in output) == (2, True)
    assert not (slurm.state / "steps.jsonl").exists()


def test_steps_use_all_cores_and_are_not_killed_by_another_exit(slurm):
    slurm.exits(0, 0)
    slurm.run("train.sbatch", "my.yaml")
    slurm.run("preprocess.sbatch", "my.yaml", options=("--cpus-per-task=6",))
    train, preprocess = slurm.steps
    assert train["cpu-bind"] == "none"
    assert train["kill-on-bad-exit"] == "0"
    assert preprocess["cpus-per-task"] == "6"


@pytest.mark.end_to_end
def test_signalled_preprocessing_is_requeued_and_finishes(slurm):
    """The real command, restarted after a start that was stopped by the signal."""
    write_config(slurm.folder, tiny_settings())
    real = f'os.execv("{sys.executable}", ["python", "-m", "lmtrain", *sys.argv[1:]])\n'
    # the first start sends itself the signal: this tests the script; tests/faults tests the command
    signalled = (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    slurm.fake_lmtrain(f"if start == 1:\n    {signalled.strip().replace(chr(10), chr(10) + '    ')}\n{real}")
    code, output = slurm.run("preprocess.sbatch", "tiny.json")
    assert code == 0, output
    assert "exit 75, requeue 1 of" in output
    assert (slurm.folder / "cache" / "train" / "manifest.json").exists()


def test_the_page_states_what_its_commands_need():
    assert all(needs(before) for before, _ in blocks(SLURM / "README.md"))


def test_secrets_are_nowhere_in_the_scripts():
    for file in SLURM.iterdir():
        assert "=$WANDB" not in file.read_text()
        assert "API_KEY=" not in file.read_text()
