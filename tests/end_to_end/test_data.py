"""Mixtures, epochs and several validation sets, from the command line."""

import json

import pytest
from conftest import TRAIN_FILES, VALIDATION_FILES


def metrics(tmp_path, name="tiny"):
    return [json.loads(line) for line in (tmp_path / "logs" / f"{name}.metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def mixed(settings, write_config):
    """`mixed(**data)` writes a config with a mixture of two sources, both with a validation set."""

    def write(**data):
        del settings["data"]["train_urls"], settings["data"]["validation_urls"]
        settings["data"] |= {
            "configs": {
                "first": {"train_urls": TRAIN_FILES[:1], "validation_urls": VALIDATION_FILES},
                "second": {"train_urls": TRAIN_FILES[1:], "validation_urls": TRAIN_FILES[:1]},
            },
            "train_weights": {"first": 1, "second": 3},
            "shuffle": True,
        } | data
        settings["trainer"] |= {"id": "tiny", "num_train_steps": 6, "steps_per_eval": 3}
        return write_config(settings)

    return write


@pytest.mark.long
def test_a_mixture_trains_and_resumes_and_is_evaluated_by_source(mixed, run_cli, tmp_path):
    mixed()
    complete = run_cli("train", "tiny.yaml")
    assert complete.returncode == 0, complete.stderr
    assert "one epoch of first (25 % of the examples) is " in complete.stderr
    lines = metrics(tmp_path)
    (last,) = [line for line in lines if line["step"] == 6 and "eval/loss" in line]
    assert last["eval/macro_loss"] == pytest.approx((last["eval/first/loss"] + last["eval/second/loss"]) / 2)
    assert min(last["eval/first/loss"], last["eval/second/loss"]) < last["eval/loss"]

    half = ["--trainer.id", "again", "--trainer.checkpointer.keep", "[{every: 3}]"]
    assert run_cli("train", "tiny.yaml", *half, "--trainer.num_train_steps", 3).returncode == 0
    assert run_cli("train", "tiny.yaml", *half).returncode == 0
    kept = ("step", "eval/loss", "eval/first/loss")
    again = [{name: line[name] for name in kept} for line in metrics(tmp_path, "again") if "eval/loss" in line]
    # the first half ended with another learning rate: the losses differ, the steps are the same
    assert [line["step"] for line in again] == [3, 6]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"first", "second"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_weights": {"first": 1, "third": 1}}, "source 'third'"),
        ({"train_weights": {"first": 0, "second": 0}}, "all weights are 0"),
        ({"train_urls": ["a"]}, "set together with train_urls"),
    ],
)
def test_an_invalid_mixture_is_refused(mixed, run_cli, data, message):
    mixed(**data)
    refused = run_cli("config", "check", "tiny.yaml")
    assert refused.returncode == 2
    assert message in refused.stderr


@pytest.mark.long
def test_a_run_can_end_when_the_first_source_is_exhausted(mixed, run_cli):
    mixed(stop_strategy="first_exhausted", train_weights={"first": 1, "second": 1})
    done = run_cli("train", "tiny.yaml", "--trainer.num_train_steps", 100000, "--trainer.train_batch_size", 512)
    assert done.returncode == 0, done.stderr
    assert "data.stop_strategy first_exhausted: the data ends the run after " in done.stderr


@pytest.mark.long
def test_a_run_can_end_after_a_number_of_epochs(settings, write_config, run_cli, tmp_path):
    settings["trainer"] |= {
        "id": "tiny",
        "num_train_steps": 100_000,
        "train_batch_size": 256,
        "per_device_parallelism": 64,
    }
    settings["data"]["shuffle"] = 64
    write_config(settings)
    done = run_cli("train", "tiny.yaml", "--epoch", 2)
    assert done.returncode == 0, done.stderr
    tokens = json.loads((tmp_path / "cache" / "train" / "manifest.json").read_text())["tokens"]
    steps = 2 * (tokens // 32) // 256
    assert f"epoch 2: the data ends the run after {steps:,} steps" in done.stderr
    assert max(line["step"] for line in metrics(tmp_path)) == steps
    again = run_cli("train", "tiny.yaml", "--epoch", 2)
    assert (again.returncode, "nothing to do" in again.stderr) == (0, True)
