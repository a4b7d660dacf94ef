"""Early stopping, and the checkpoint with the best evaluation: also across a resume."""

import json

import pytest
import yaml
from conftest import run_in_process, tiny_settings

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def config(tmp_path):
    """A config whose evaluation loss falls, and then rises: the learning rate becomes far too high."""
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 60, "steps_per_eval": 2, "id": "one"}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": [], "keep_best": {}}
    settings["optimizer"] = {"learning_rate": 0.3, "warmup": 0, "lr_schedule": "constant", "max_grad_norm": None}

    def write(**trainer):
        settings["trainer"] |= trainer
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
        return tmp_path

    return write


def train(folder, *overrides):
    done = run_in_process(["train", "tiny.yaml", *overrides], folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder):
    lines = map(json.loads, (folder / "logs" / "one.metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


def kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints" / "one").glob("step-*"))


def test_the_best_checkpoint_is_kept_and_the_run_ends_when_it_no_longer_improves(config):
    large = {"min_delta": 1.0}  # which no later difference comes near, on any processor
    checkpoints = {"save_interval": None, "keep": [], "keep_best": large}
    folder = config(early_stopping={"patience": 3, **large}, checkpointer=checkpoints)
    output = train(folder)
    found = losses(folder)
    last = max(found)
    best = last - 3 * 2
    assert 2 < best < last < 60
    assert found[best - 2] - found[best] > 1 > found[best] - min(found.values())
    assert kept(folder) == [best, last]
    assert f"early stopping after step {last}" in output
    again = train(folder)
    assert f"step-{last} has {last} steps, as early stopping" in again
    more = train(folder, "--trainer.early_stopping.patience", "5")
    assert f"early stopping after step {last + 4}" in more
    assert kept(folder) == [best, last, last + 4]


@pytest.mark.long  # the test above resumes too
def test_a_resumed_run_keeps_the_best_checkpoint_of_before(config):
    folder = config()
    train(folder, "--trainer.num_train_steps", "20")
    found = losses(folder)
    before = min(found, key=found.get)
    assert set(kept(folder)) >= {before, 20}
    train(folder)
    found = losses(folder)
    best = min(found, key=found.get)
    assert set(kept(folder)) == {20, best, 60}
