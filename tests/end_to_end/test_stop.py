"""The number of steps that still run after a signal: only the current one if steps are long."""

import json
import os
from pathlib import Path

import pytest
from conftest import run_in_process, tiny_settings
from forked import Forked
from multihost.processes import free_port

pytestmark = pytest.mark.end_to_end

# Train, with a SIGTERM at a known moment: after the metrics of a step were read, during the evaluation after it, or
# while the run waits for data that is still being tokenized.
SCRIPT = """
import os, signal, sys
from lmtrain.commands import train
from lmtrain.evaluation import perplexity
from lmtrain.runtime.signals import StoppedError
from lmtrain.train.loop import reporter, throughput
from lmtrain.train.start.train_batches import TrainBatches

built, after = perplexity.build_eval_step, TrainBatches.after

moment, at, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
throughput.LONG_STEP_SECONDS = seconds

def signalled(function, steps=iter(range(1, 100))):
    def call(*arguments):
        result = function(*arguments)
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return result
    return call

def batches_of_finished_shards(*arguments):
    for number, batch in enumerate(after(*arguments)):
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StoppedError  # as the reader that waits for the next shard
        yield batch

if moment == "step":
    reporter.Reporter._check = signalled(reporter.Reporter._check)
elif moment == "evaluation":
    perplexity.Perplexity.evaluate = signalled(perplexity.Perplexity.evaluate)
elif moment == "batch":
    perplexity.build_eval_step = lambda *arguments: signalled(built(*arguments))
elif moment == "data":
    TrainBatches.after = batches_of_finished_shards
sys.exit(train.run(sys.argv[4:]))
"""
SHORT, LONG = 1000.0, 0.0  # limits for a long step: no step exceeds the first, every step exceeds the second


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    (folder / "tiny.json").write_text(json.dumps(tiny_settings()))
    assert run_in_process(["preprocess", "tiny.json"], folder).returncode == 0
    return folder


def start(folder: Path, run: str, moment: str, at: int, seconds: float, *flags: object) -> Forked:
    arguments = (moment, at, seconds, "tiny.json", "--trainer.id", run, *flags)
    return Forked(arguments, folder, folder / f"{run}.{free_port()}.txt", SCRIPT)


def saved_step(folder: Path, run: str, processes: list[Forked]) -> int:
    """The last step that was trained and saved. Waits for all processes, which must exit with 75."""
    for process in processes:
        assert process.wait(timeout=240) == 75, process.output.read_text()
    newest = max(int(name.removeprefix("step-")) for name in os.listdir(folder / "checkpoints" / run) if "step" in name)
    lines = (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == newest
    return newest


@pytest.mark.parametrize(("seconds", "last"), [(LONG, 3), pytest.param(SHORT, 4, marks=pytest.mark.long)])
def test_a_long_step_is_the_last_one_after_a_signal_and_a_short_one_is_followed_by_another(folder, seconds, last):
    """Metrics of step 3 are read when it is finished: then no step runs, or step 4 is already running."""
    run = f"alone-{last}"
    assert saved_step(folder, run, [start(folder, run, "step", 3, seconds)]) == last


@pytest.mark.long
def test_no_step_starts_after_a_signal_during_evaluation(folder):
    process = start(folder, "evaluating", "evaluation", 1, SHORT, "--trainer.steps_per_eval", 3)
    assert saved_step(folder, "evaluating", [process]) == 3


def test_a_signal_while_waiting_for_data_saves_the_steps_of_this_start(folder):
    run = "waiting"
    assert saved_step(folder, run, [start(folder, run, "data", 3, SHORT)]) == 3
    manifest = folder / "checkpoints" / run / "step-3" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    assert saved_step(folder, run, [start(folder, run, "data", 0, SHORT)]) == 3  # waits for its first batch
    assert manifest.stat().st_mtime_ns == before


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "last"), [(LONG, 4), (SHORT, 6)])
def test_several_processes_stop_together_after_one_more_long_step(folder, seconds, last):
    """One process gets the signal before or during step 4, and informs the other in the next step: 4 or 5."""
    run, port = f"two-{last}", free_port()
    meet = ("--trainer.distributed.coordinator_address", f"127.0.0.1:{port}", "--trainer.distributed.num_processes", 2)
    processes = [
        start(folder, run, moment, 3, seconds, *meet, "--trainer.distributed.process_id", number)
        for number, moment in enumerate(("none", "step"))
    ]
    assert saved_step(folder, run, processes) == last


def logged(folder: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.long), 12])
def test_an_evaluation_that_a_signal_interrupts_is_repeated_once_when_the_run_resumes(folder, step):
    """The signal comes between two of its batches. Also for the last step, if the run is started several times."""
    run = f"evaluation-of-{step}"
    every = ("--trainer.steps_per_eval", step)
    process = start(folder, run, "batch", 1, SHORT, *every)
    assert saved_step(folder, run, [process]) == step
    assert not [line for line in logged(folder, run) if "eval/loss" in line]
    for _ in range(3 if step == 12 else 1):
        done = run_in_process(["train", "tiny.json", "--trainer.id", run, *every], folder)
        assert done.returncode == 0, done.stderr
    complete = run_in_process(["train", "tiny.json", "--trainer.id", f"{run}-complete", *every], folder)
    assert complete.returncode == 0, complete.stderr
    found, expected = (
        [(line["step"], line["eval/loss"]) for line in logged(folder, name) if "eval/loss" in line]
        for name in (run, f"{run}-complete")
    )
    assert found == expected
    assert [at for at, _ in found] == list(range(step, 13, step))
