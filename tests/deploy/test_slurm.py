"""The batch scripts under a fake Slurm: two real processes signalled and requeued; requeued exit codes."""

import json
import os
import socket
import subprocess
import sys

import pytest
from conftest import log_lines, run_in_process, tiny_settings
from deploy.fake_slurm import install, warn
from deploy.scripts import DEPLOY, ROOT, shellcheck
from faults.runs import end, wait_for, write_config

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

SLURM = DEPLOY / "slurm"
STEPS = 60


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


class Slurm:
    """`start("train.sbatch", ...)` submits from `folder`."""

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


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


UNTIL_SIGNALLED = """
import signal, time
if start > 1:
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
open("up-" + os.environ["SLURM_PROCID"], "w").close()
while True:
    time.sleep(0.01)
"""


def test_the_signal_before_the_time_limit_reaches_the_processes_of_all_nodes_and_the_job_is_requeued(slurm):
    """tests/faults/test_signals.py tests what two processes of a run do then."""
    slurm.fake_lmtrain(UNTIL_SIGNALLED)
    process = slurm.start("train.sbatch", "my.yaml", options=("--nodes", "2", "--gpus-per-node", "0"))
    try:
        wait_for(lambda: len(list(slurm.folder.glob("up-*"))) == 2, [process])
        warn(slurm.state)
        assert process.wait(timeout=300) == 0
    finally:
        end([process])
    assert f"exit {STOPPED_BY_SIGNAL}, requeue 1 of" in (slurm.folder / "output.txt").read_text()
    assert [step["ntasks"] for step in slurm.steps] == ["2", "2"]


@pytest.mark.parametrize("script", ["train.sbatch", "preprocess.sbatch"])
@pytest.mark.parametrize(
    ("codes", "starts", "given"),
    [
        *(((code, 0), 2, {}) for code in (75, 134, 1, 137)),  # what a restart can resume is requeued
        *(((code, 1), 1, {}) for code in (0, 2)),  # success and mistakes are not
        ((1, 75, 137, 1), 3, {"MAX_REQUEUES": "2"}),
        ((1, 1, 1), 2, {"SLURM_RESTART_COUNT": "19"}),  # requeues by Slurm count too
    ],
)
def test_what_is_requeued_and_how_often(slurm, script, codes, starts, given):
    slurm.exits(*codes)
    assert slurm.run(script, "my.yaml", "--a.b", "c d", **given)[0] == codes[starts - 1]
    assert len(slurm.steps) == starts


@pytest.mark.parametrize("script", ["train.sbatch", "preprocess.sbatch"])
def test_death_by_the_signal_before_the_time_limit_counts_as_stopped(slurm, script):
    slurm.fake_lmtrain("import signal\nos.kill(os.getpid(), signal.SIGUSR1)\n")  # before its handlers are installed
    code, output = slurm.run(script, "my.yaml", MAX_REQUEUES="0")
    assert code == STOPPED_BY_SIGNAL, output
    assert "exit 75 after 0 requeues, MAX_REQUEUES is 0: not requeued" in output


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"RUN_ID": "mine"}, "mine")])
def test_the_run_id_stays_the_same_after_requeues(slurm, given, expected):
    slurm.exits(75, 134, 0)
    assert slurm.run("train.sbatch", "my.yaml", "--a.b=c", **given)[0] == 0
    seen = (slurm.folder / "seen.txt").read_text().splitlines()
    assert seen == [f"{expected or f'slurm-{slurm.job}'} train my.yaml --a.b=c"] * 3


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


def of_two(slurm):
    """The metrics of a run of two processes by step, without times."""
    names = ("step", "train/loss", "eval/loss", "train/gradient_norm")
    lines = log_lines(slurm.folder, f"slurm-{slurm.job}")
    found = [{name: line[name] for name in names if name in line} for line in lines]
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


def ladder_jobs(slurm, *options, **changes):
    """Write the arrays of a ladder, and submit them. -> exit code, output"""
    settings = tiny_settings()
    settings["trainer"] |= {"steps_per_eval": 50, "max_eval_batches": 2}
    del settings["trainer"]["num_train_steps"]
    write_config(slurm.folder, settings)
    sizes = {"hidden_dim": 16, "num_heads": 2, "num_layers": 1}
    ladder = {"config": "tiny.json", "sizes": [sizes], "tokens_per_parameter": [1, 2], **changes}
    (slurm.folder / "ladder.yaml").write_text(json.dumps(ladder))
    done = run_in_process(["scaling", "run", "ladder.yaml", "--slurm", "jobs"], slurm.folder, code=0)
    assert done.stdout == "run: bash jobs/submit.sh [OPTIONS OF SBATCH]\n"
    shellcheck(slurm.folder / "jobs/submit.sh")
    command = ["bash", "jobs/submit.sh", *options]
    environment = os.environ | slurm.environment
    ended = subprocess.run(command, cwd=slurm.folder, env=environment, capture_output=True, text=True, timeout=300)
    return ended.returncode, ended.stdout


def arrays(slurm):
    return [json.loads(line) for line in (slurm.state / "arrays.jsonl").read_text().splitlines()]


def test_the_arrays_of_a_ladder_start_its_runs_in_order(slurm):
    slurm.exits(75, 0, 0)
    code, output = ladder_jobs(slurm, "--gpus-per-node=0")
    assert (code, output) == (0, "array 1000: 1 run\narray 1001: 1 run\n")
    assert [(array["dependency"], array["tasks"], array["code"]) for array in arrays(slurm)] == [
        (None, 1, 0),
        ("afterok:1000", 1, 0),
    ]
    longest, again, branch = [line.split()[2:] for line in (slurm.folder / "seen.txt").read_text().splitlines()]
    assert longest == again
    assert "--trainer.id=ladder-16x1-2x-lr0.01-seed0" in longest
    assert any(word.startswith("--trainer.initialize_from=") for word in branch)


def test_runs_that_need_a_failed_one_do_not_start(slurm):
    slurm.exits(2)
    assert ladder_jobs(slurm)[0] == 0
    assert [(array["tasks"], array["code"]) for array in arrays(slurm)] == [(1, 2), (0, 2)]


@pytest.mark.end_to_end
@pytest.mark.long
def test_the_arrays_of_a_ladder_train_its_runs(slurm):
    code, _ = ladder_jobs(slurm, "--gpus-per-node=0", learning_rates=[1e-3, 2e-3])
    assert code == 0
    status = run_in_process(["scaling", "status", "ladder.yaml"], slurm.folder, code=0)
    assert "left: 1 run, " in status.stdout, status.stdout
    assert [array["code"] for array in arrays(slurm)] == [0]


def test_secrets_are_nowhere_in_the_scripts():
    for file in SLURM.iterdir():
        assert "=$WANDB" not in file.read_text()
        assert "API_KEY=" not in file.read_text()
