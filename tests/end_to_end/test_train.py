"""`lmtrain train` as a user runs it: killed at any moment and resumed, it ends with the bytes of an undisturbed run."""

import json
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import run_in_process, tiny_settings
from forked import Forked

pytestmark = pytest.mark.end_to_end

RUN = "one"
TRIES = 5
TIMES = ("throughput/", "checkpoint/", "goodput/", "memory/", "compile/")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, train(folder)


def write(folder: Path, settings: dict) -> Path:
    path = folder / "tiny.json"  # JSON is YAML
    path.write_text(json.dumps(settings))
    return path


def command(folder: Path, *overrides: str) -> list[str]:
    config = write(folder, tiny_settings())
    return ["train", str(config), "--trainer.id", RUN, *overrides]


def train(folder: Path, *overrides: str, code: int = 0) -> str:
    done = run_in_process(command(folder, *overrides), folder)
    assert done.returncode == code, done.stderr
    return done.stderr


def arrays(folder: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint as bytes, by name."""
    tree = {}
    for part in ("params", "optimizer"):
        path = folder / "checkpoints" / RUN / f"step-{step}" / part
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of reading the shardings from the file, which is intended
            tree[part] = orbax.restore(path)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(name): np.asarray(leaf).tobytes() for name, leaf in leaves}


def metrics(folder: Path) -> list[dict]:
    """The metrics log without times."""
    lines = (folder / "logs" / f"{RUN}.metrics.jsonl").read_text().splitlines()
    plain = [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]
    return [line for line in plain if line.keys() != {"step"}]


def test_a_run_prints_its_id_first_and_saves_the_steps_of_its_policy(undisturbed):
    folder, printed = undisturbed
    assert printed.splitlines()[0] == f"run {RUN}"
    assert sorted(os.listdir(folder / "checkpoints" / RUN)) == ["step-12", "step-4", "step-8"]
    assert "2 of 36 batches of cache/validation (trainer.max_eval_batches)" in printed


def test_the_loss_falls(undisturbed):
    losses = [m["train/loss"] for m in metrics(undisturbed[0]) if "train/loss" in m]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(np.log(384), abs=0.05)  # uniform at initialization
    assert losses[-1] < losses[0] - 0.5


def test_every_step_and_evaluation_is_logged_once_in_order(undisturbed):
    lines = metrics(undisturbed[0])
    assert [m["step"] for m in lines if "train/loss" in m] == list(range(1, 13))
    assert [m["step"] for m in lines if "eval/loss" in m] == [6, 12]


@pytest.mark.long
def test_training_twice_gives_the_same_bytes(undisturbed, tmp_path):
    train(tmp_path)
    assert arrays(tmp_path, 12) == arrays(undisturbed[0], 12)
    assert metrics(tmp_path) == metrics(undisturbed[0])


@pytest.mark.parametrize(
    "after", ["step-4", *(pytest.param(name, marks=pytest.mark.long) for name in ("one.metrics.jsonl", "step-8"))]
)
def test_killed_and_resumed_gives_the_same_bytes(undisturbed, tmp_path, after):
    """kill -9 as soon as `after` appears: after the first checkpoint, before any, in the middle."""
    watched = {"one.metrics.jsonl": tmp_path / "logs" / after}.get(
        after, tmp_path / "checkpoints" / RUN / after / "manifest.json"
    )
    for _ in range(TRIES):  # on a fast machine the run may finish first
        process = Forked(command(tmp_path), tmp_path, tmp_path / "output.txt")
        while not watched.exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not (tmp_path / "checkpoints" / RUN / "step-12" / "manifest.json").exists():
            break
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.rmtree(tmp_path / "logs")
    else:
        raise AssertionError(f"{TRIES} kills came too late")
    printed = train(tmp_path)
    if after.startswith("step"):
        assert f"resuming after step {after.removeprefix('step-')}" in printed
    assert arrays(tmp_path, 12) == arrays(undisturbed[0], 12)
    assert metrics(tmp_path) == metrics(undisturbed[0])


def test_sigterm_saves_the_last_finished_step_and_exits_75(undisturbed, tmp_path):
    for _ in range(TRIES):  # on a fast machine the run may finish first
        process = Forked(command(tmp_path), tmp_path, tmp_path / "output.txt")
        while not (tmp_path / "checkpoints" / RUN / "step-4" / "manifest.json").exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=300) != 0:
            break
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.rmtree(tmp_path / "logs")
    assert process.returncode == 75, process.output.read_text()
    newest = max(int(name.removeprefix("step-")) for name in os.listdir(tmp_path / "checkpoints" / RUN))
    assert metrics(tmp_path)[-1]["step"] == newest
    train(tmp_path)
    assert arrays(tmp_path, 12) == arrays(undisturbed[0], 12)
    assert metrics(tmp_path) == metrics(undisturbed[0])


def test_a_finished_run_with_other_settings_is_refused(undisturbed):
    kept = undisturbed[0] / "logs" / RUN / "config.yaml"
    config = kept.read_text()
    output = train(undisturbed[0], "--trainer.seed", "7", code=2)
    assert kept.read_text() == config  # which `--run` uses
    assert "step-12 belongs to another run" in output
    assert "seed: the checkpoint has 0, this config has 7" in output


def test_a_finished_run_has_nothing_to_do_and_changes_nothing(undisturbed):
    folder, _ = undisturbed
    before = arrays(folder, 12), metrics(folder)
    printed = train(folder)
    assert "nothing to do" in printed
    assert "to start a new run, set another trainer.id" in printed
    assert (arrays(folder, 12), metrics(folder)) == before


@pytest.mark.long
def test_a_run_with_more_steps_resumes_with_a_notice(undisturbed, tmp_path):
    train(tmp_path)
    printed = train(tmp_path, "--trainer.num_train_steps", "14")
    assert "trainer.num_train_steps: the checkpoint has 12, this run has 14" in printed
    assert metrics(tmp_path)[-1]["step"] == 14


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (("--trainer.seed", "1"), "seed"),
        *(
            pytest.param(*values, marks=pytest.mark.long)
            for values in (
                (("--model.num_heads", "4"), "model.num_heads"),
                (("--trainer.train_batch_size", "8"), "train_batch_size"),
                (("--data.enforce_bos", "true", "--data.cache_dir", "cache2"), "data.enforce_bos"),
            )
        ),
    ],
)
def test_another_run_under_the_same_id_is_refused(undisturbed, override, field):
    folder, _ = undisturbed
    # 13 steps: more than the run has finished
    printed = train(folder, *override, "--trainer.num_train_steps", "13", code=2)
    assert "another run" in printed
    assert field in printed


@pytest.mark.long
def test_accumulation_gives_the_same_losses(undisturbed, tmp_path):
    train(tmp_path, "--trainer.per_device_parallelism", "1")
    alone = [m["train/loss"] for m in metrics(undisturbed[0]) if "train/loss" in m]
    accumulated = [m["train/loss"] for m in metrics(tmp_path) if "train/loss" in m]
    np.testing.assert_allclose(accumulated, alone, rtol=1e-5)


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_before_a_save(tmp_path):
    printed = train(tmp_path, "--optimizer.learning_rate", "1e30", "--optimizer.max_grad_norm", "null", code=1)
    assert "the loss of step" in printed
    assert "Traceback" not in printed
    for name in os.listdir(tmp_path / "checkpoints" / RUN) if (tmp_path / "checkpoints" / RUN).exists() else []:
        step = int(name.removeprefix("step-"))
        assert all(np.isfinite(m.get("train/loss", 0.0)) for m in metrics(tmp_path) if m["step"] <= step)
