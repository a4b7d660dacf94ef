"""`lmtrain train` as a user runs it: killed at any moment and resumed, it ends with the bytes of an undisturbed run."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import logged, run_in_process, tiny_settings
from faults.runs import (
    RUN,
    array_bytes,
    complete_steps,
    log_file,
    metrics,
    run_folder,
    running,
    trained_steps,
    write_config,
)
from forked import Forked

pytestmark = pytest.mark.end_to_end

LAST = 12
TRIES = 5


def train(folder: Path, *overrides: object, code: int = 0) -> str:
    write_config(folder, tiny_settings())
    return run_in_process(["train", "tiny.json", "--trainer.id", RUN, *overrides], folder, code).stderr


def interrupt(folder: Path, watched: Path, number: int) -> Forked:
    """A run that ended by a signal as soon as `watched` appeared. On a fast machine it may finish first: it repeats."""
    for _ in range(TRIES):
        write_config(folder, tiny_settings())
        with running(folder) as process:
            while not watched.exists() and process.poll() is None:
                time.sleep(0.001)
            process.send_signal(number)
            process.wait(timeout=300)
        if LAST not in complete_steps(folder):
            return process
        shutil.rmtree(folder / "checkpoints")
        shutil.rmtree(folder / "logs")
    raise AssertionError(f"{TRIES} signals came too late")


def assert_same(folder: Path, other: Path) -> None:
    assert array_bytes(folder, LAST) == array_bytes(other, LAST)
    assert metrics(folder) == metrics(other)


def test_a_run_prints_its_id_logs_every_step_once_in_order_and_saves_those_of_its_policy(tiny_run):
    folder, printed = tiny_run, (tiny_run / "output.txt").read_text()
    assert printed.splitlines()[0] == f"run {RUN}"
    assert sorted(os.listdir(folder / "checkpoints" / RUN)) == ["step-12", "step-4", "step-8"]
    assert "2 of 38 batches of cache/validation (trainer.max_eval_batches)" in printed
    assert trained_steps(folder) == list(range(1, 13))
    assert [m["step"] for m in metrics(folder) if "eval/loss" in m] == [6, 12]
    losses = logged(folder, "train/loss")
    assert losses[1] == pytest.approx(np.log(384), abs=0.05)  # uniform at initialization
    assert losses[LAST] < losses[1] - 0.5


@pytest.mark.parametrize(
    "after", ["step-4", *(pytest.param(name, marks=pytest.mark.long) for name in ("one.metrics.jsonl", "step-8"))]
)
def test_killed_and_resumed_gives_the_same_bytes(tiny_run, tmp_path, after):
    """kill -9 as soon as `after` appears: after the first checkpoint, before any, in the middle."""
    watched = run_folder(tmp_path) / after / "manifest.json" if "step" in after else log_file(tmp_path)
    interrupt(tmp_path, watched, signal.SIGKILL)
    printed = train(tmp_path)
    if after.startswith("step"):
        assert f"resuming after step {after.removeprefix('step-')}" in printed
    assert_same(tmp_path, tiny_run)


def test_sigterm_saves_the_last_finished_step_and_exits_75(tiny_run, tmp_path):
    process = interrupt(tmp_path, run_folder(tmp_path) / "step-4" / "manifest.json", signal.SIGTERM)
    assert process.returncode == 75, (tmp_path / "output.txt").read_text()
    assert metrics(tmp_path)[-1]["step"] == complete_steps(tmp_path)[-1]
    train(tmp_path)
    assert_same(tmp_path, tiny_run)


def test_a_run_with_other_settings_is_refused(tiny_run, tmp_path):
    """Whether it is finished or not."""
    folder = shutil.copytree(tiny_run, tmp_path / "copy")
    kept = folder / "logs" / RUN / "config.yaml"
    config = kept.read_text()
    for steps in (12, 13):
        output = train(folder, "--trainer.seed", "7", "--trainer.num_train_steps", steps, code=2)
        assert kept.read_text() == config  # which `--run` uses
        assert "seed: the checkpoint has 0, this config has 7" in output


@pytest.mark.long
def test_a_run_with_more_steps_resumes_with_a_notice(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "copy")
    printed = train(folder, "--trainer.num_train_steps", "14")
    assert "trainer.num_train_steps: the checkpoint has 12, this run has 14" in printed
    assert metrics(folder)[-1]["step"] == 14


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_before_a_save(tmp_path):
    printed = train(tmp_path, "--optimizer.learning_rate", "1e30", "--optimizer.max_grad_norm", "null", code=1)
    assert "the loss of step" in printed
    assert "Traceback" not in printed
    for step in complete_steps(tmp_path):
        assert all(np.isfinite(m.get("train/loss", 0.0)) for m in metrics(tmp_path) if m["step"] <= step)
