"""How many steps still run after a signal: of long ones none but the one under way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_in_process, tiny_settings
from multihost.processes import free_port

pytestmark = pytest.mark.end_to_end

# Train, with a SIGTERM at a known moment: when the metrics of a step have been read, or while evaluating after it.
SCRIPT = """
import os, signal, sys
from lmtrain.commands import train
from lmtrain.evaluation import perplexity
from lmtrain.train.loop import reporter, throughput

built = perplexity.build_eval_step

moment, at, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
throughput.LONG_STEP_SECONDS = seconds

def signalled(function, steps=iter(range(1, 100))):
    def call(*arguments):
        result = function(*arguments)
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return result
    return call

if moment == "step":
    reporter.Reporter._check = signalled(reporter.Reporter._check)
elif moment == "evaluation":
    perplexity.Perplexity.evaluate = signalled(perplexity.Perplexity.evaluate)
elif moment == "batch":
    perplexity.build_eval_step = lambda *arguments: signalled(built(*arguments))
sys.exit(train.run(sys.argv[4:]))
"""
SHORT, LONG = 1000.0, 0.0  # than which every step is shorter, or longer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    (folder / "tiny.json").write_text(json.dumps(tiny_settings()))
    assert run_in_process(["preprocess", "tiny.json"], folder).returncode == 0
    return folder


def start(folder: Path, run: str, moment: str, at: int, seconds: float, *flags: object) -> subprocess.Popen:
    arguments = (moment, at, seconds, "tiny.json", "--trainer.id", run, *flags)
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def saved_step(folder: Path, run: str, processes: list[subprocess.Popen]) -> int:
    """The last step that was trained and saved, when all have ended as a signal lets them."""
    for process in processes:
        told = process.communicate(timeout=240)[1]
        assert process.returncode == 75, told
    newest = max(int(name.removeprefix("step-")) for name in os.listdir(folder / "checkpoints" / run) if "step" in name)
    lines = (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == newest
    return newest


@pytest.mark.parametrize(("seconds", "last"), [(LONG, 3), (SHORT, 4)])
def test_of_long_steps_only_the_one_under_way_is_finished_of_short_ones_the_next_too(folder, seconds, last):
    """Metrics of step 3 are read when it is finished: then no step runs, or step 4 does already."""
    run = f"alone-{last}"
    assert saved_step(folder, run, [start(folder, run, "step", 3, seconds)]) == last


def test_a_signal_while_evaluating_lets_no_other_step_begin(folder):
    process = start(folder, "evaluating", "evaluation", 1, SHORT, "--trainer.steps_per_eval", 3)
    assert saved_step(folder, "evaluating", [process]) == 3


@pytest.mark.parametrize(("seconds", "last"), [(LONG, 4), pytest.param(SHORT, 6, marks=pytest.mark.long)])
def test_of_several_processes_one_more_long_step_tells_all(folder, seconds, last):
    """The signal comes to one of them: before step 4, which then carries its wish, or in step 4, and step 5 does."""
    run, port = f"two-{last}", free_port()
    meet = ("--trainer.distributed.coordinator_address", f"127.0.0.1:{port}", "--trainer.distributed.num_processes", 2)
    processes = [
        start(folder, run, moment, 3, seconds, *meet, "--trainer.distributed.process_id", number)
        for number, moment in enumerate(("none", "step"))
    ]
    assert saved_step(folder, run, processes) == last


def logged(folder: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("step", [3, 12])
def test_an_evaluation_that_a_signal_ends_is_made_when_the_run_is_resumed_and_once(folder, step):
    """Between two batches of it; also that of the last step, and though the run is started again and again."""
    run = f"evaluation-of-{step}"
    every = ("--trainer.steps_per_eval", step)
    process = start(folder, run, "batch", 1, SHORT, *every)
    assert saved_step(folder, run, [process]) == step
    assert not [line for line in logged(folder, run) if "eval/loss" in line]
    for _ in range(3 if step == 12 else 1):
        done = run_in_process(["train", "tiny.json", "--trainer.id", run, *every], folder)
        assert done.returncode == 0, done.stderr
    whole = run_in_process(["train", "tiny.json", "--trainer.id", f"{run}-whole", *every], folder)
    assert whole.returncode == 0, whole.stderr
    found, expected = (
        [(line["step"], line["eval/loss"]) for line in logged(folder, name) if "eval/loss" in line]
        for name in (run, f"{run}-whole")
    )
    assert found == expected
    assert [at for at, _ in found] == list(range(step, 13, step))
