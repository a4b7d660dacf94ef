"""Mixtures, epochs and several validation sets, from the command line."""

import json

import pytest
from conftest import TRAIN_FILES, VALIDATION_FILES, log_lines, logged


@pytest.mark.long
def test_a_mixture_trains_and_resumes_and_is_evaluated_by_source(settings, write_config, run_cli, tmp_path):
    del settings["data"]["train_urls"], settings["data"]["validation_urls"]
    settings["data"] |= {
        "configs": {
            "first": {"train_urls": TRAIN_FILES[:1], "validation_urls": VALIDATION_FILES},
            "second": {"train_urls": TRAIN_FILES[1:], "validation_urls": TRAIN_FILES[:1]},
        },
        "train_weights": {"first": 1, "second": 3},
        "shuffle": True,
    }
    settings["trainer"] |= {"id": "tiny", "num_train_steps": 6, "steps_per_eval": 3}
    write_config(settings)
    assert "one epoch of first (25 % of the examples) is " in run_cli("train", "tiny.yaml", code=0).stderr
    lines = log_lines(tmp_path, "tiny")
    (last,) = [line for line in lines if line["step"] == 6 and "eval/loss" in line]
    assert last["eval/macro_loss"] == pytest.approx((last["eval/first/loss"] + last["eval/second/loss"]) / 2)
    assert min(last["eval/first/loss"], last["eval/second/loss"]) < last["eval/loss"]

    half = ["--trainer.id", "again", "--trainer.checkpointer.keep", "[{every: 3}]"]
    run_cli("train", "tiny.yaml", *half, "--trainer.num_train_steps", 3, code=0)
    run_cli("train", "tiny.yaml", *half, code=0)
    # the first half ended with another learning rate: the losses differ, the steps are the same
    assert list(logged(tmp_path, "eval/first/loss", "again")) == [3, 6]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"first", "second"}


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
    done = run_cli("train", "tiny.yaml", "--epoch", 2, code=0)
    tokens = json.loads((tmp_path / "cache" / "train" / "manifest.json").read_text())["tokens"]
    steps = 2 * (tokens // 32) // 256
    assert f"epoch 2: the data ends the run after {steps:,} steps" in done.stderr
    assert log_lines(tmp_path, "tiny")[-1]["step"] == steps
    again = run_cli("train", "tiny.yaml", "--epoch", 2)
    assert (again.returncode, "nothing to do" in again.stderr) == (0, True)
