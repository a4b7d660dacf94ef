"""The number of steps that still run after a signal: only the current one if steps are long."""

import itertools
import json
import os
from pathlib import Path

import pytest
from conftest import log_lines, logged, run_in_process, tiny_settings
from faults.runs import output_of
from forked import Forked, ended
from multihost.processes import meeting_place
from servers import free_ports

pytestmark = pytest.mark.end_to_end

# Train, with a SIGTERM at a known moment: when the step has been compiled, after the metrics of a step were read,
# during the evaluation after it, or while the run waits for data that is still being tokenized.
SCRIPT = """
import os, signal, sys
from lmtrain.__main__ import main
from lmtrain.evaluation import perplexity
from lmtrain.runtime.signals import StoppedError
from lmtrain.train.loop import due, reporter
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.start.train_batches import TrainBatches

built, after = perplexity.build_eval_step, TrainBatches.after

moment, at, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
due.LONG_STEP_SECONDS = seconds

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

if moment == "compile":
    CompilingStep.compile = signalled(CompilingStep.compile)
elif moment == "step":
    reporter.Reporter._check = signalled(reporter.Reporter._check)
elif moment == "evaluation":
    perplexity.Perplexity.evaluate = signalled(perplexity.Perplexity.evaluate)
elif moment == "batch":
    perplexity.build_eval_step = lambda *arguments: signalled(built(*arguments))
elif moment == "data":
    TrainBatches.after = batches_of_finished_shards
sys.argv = ["lmtrain", "train", *sys.argv[4:]]
main()
"""
SHORT, LONG = 1000.0, 0.0  # limits for a long step: no step exceeds the first, every step exceeds the second


_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    (folder / "tiny.json").write_text(json.dumps(tiny_settings()))
    run_in_process(["preprocess", "tiny.json"], folder, code=0)
    return folder


def start(folder: Path, run: str, moment: str, at: int, seconds: float, *flags: object) -> Forked:
    arguments = (moment, at, seconds, "tiny.json", "--trainer.id", run, *flags)
    return Forked(arguments, folder, folder / f"{run}.{next(_NUMBERS)}.txt", SCRIPT)


def saved_step(folder: Path, run: str, *processes: Forked) -> int:
    """The last step that was trained and saved. Waits for the processes, which must exit with 75."""
    with ended(*processes):
        for process in processes:
            output_of(process, 75)
    newest = max(int(name.removeprefix("step-")) for name in os.listdir(folder / "checkpoints" / run) if "step" in name)
    assert max(line["step"] for line in log_lines(folder, run)) == newest
    return newest


@pytest.mark.parametrize(("seconds", "last"), [(LONG, 3), pytest.param(SHORT, 4, marks=pytest.mark.long)])
def test_a_long_step_is_the_last_one_after_a_signal_and_a_short_one_is_followed_by_another(folder, seconds, last):
    """Metrics of step 3 are read when it is finished: then no step runs, or step 4 is already running."""
    run = f"alone-{last}"
    assert saved_step(folder, run, start(folder, run, "step", 3, seconds)) == last


@pytest.mark.long
def test_no_step_starts_after_a_signal_during_evaluation(folder):
    process = start(folder, "evaluating", "evaluation", 1, SHORT, "--trainer.steps_per_eval", 3)
    assert saved_step(folder, "evaluating", process) == 3


def test_a_signal_while_waiting_for_data_saves_the_steps_of_this_start(folder):
    run = "waiting"
    assert saved_step(folder, run, start(folder, run, "data", 3, SHORT)) == 3
    manifest = folder / "checkpoints" / run / "step-3" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    assert saved_step(folder, run, start(folder, run, "data", 0, SHORT)) == 3  # before its first step
    assert manifest.stat().st_mtime_ns == before


def test_a_signal_before_the_first_step_has_run_ends_the_run_at_once(folder):
    run = "early"
    process = start(folder, run, "compile", 1, SHORT)
    assert "SIGTERM: exiting immediately" in output_of(process, 75)
    assert not list((folder / "checkpoints" / run).glob("step-*"))


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.long), 12])
def test_an_evaluation_that_a_signal_interrupts_is_repeated_once_when_the_run_resumes(folder, step):
    """The signal comes between two of its batches. Also for the last step, if the run is started several times."""
    run = f"evaluation-of-{step}"
    every = ("--trainer.steps_per_eval", step)
    process = start(folder, run, "batch", 1, SHORT, *every)
    assert saved_step(folder, run, process) == step
    assert not logged(folder, "eval/loss", run)
    for _ in range(2 if step == 12 else 1):
        run_in_process(["train", "tiny.json", "--trainer.id", run, *every], folder, code=0)
    run_in_process(["train", "tiny.json", "--trainer.id", f"{run}-complete", *every], folder, code=0)
    found, expected = (
        [(line["step"], line["eval/loss"]) for line in log_lines(folder, name) if "eval/loss" in line]
        for name in (run, f"{run}-complete")
    )
    assert found == expected
    assert [at for at, _ in found] == list(range(step, 13, step))


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "last"), [(LONG, 4), (SHORT, 6)])
def test_several_processes_stop_together_after_one_more_long_step(folder, seconds, last):
    """One process gets the signal before or during step 4, and informs the other in the next step: 4 or 5."""
    run, (port,) = f"two-{last}", free_ports(1)
    processes = [
        start(folder, run, moment, 3, seconds, *meeting_place(number, 2, port))
        for number, moment in enumerate(("none", "step"))
    ]
    assert saved_step(folder, run, *processes) == last
