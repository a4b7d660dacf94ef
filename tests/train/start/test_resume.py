"""Checks that a checkpoint belongs to the run that resumes from it."""

import json
import logging

import pytest

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.runtime.errors import UserError
from lmtrain.train.start.resume import check_same_run

INFO = {
    "run_id": "a",
    "identity": {"model": {"hidden_dim": 8}, "seed": 0, "train_batch_size": 4, "data_tokens": "abc"},
    "config": {"trainer": {"num_train_steps": 10}},
    "machine": {"device": "cpu", "mesh": {"data": 1}},
    "versions": {"jax": "1"},
}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "run.json").write_text(json.dumps(INFO))
    return Checkpoint(4, str(tmp_path / "step-4"))


def changed(part: str, **changes) -> dict:
    return INFO | {part: INFO[part] | changes}


def test_the_same_run_is_accepted_without_a_message(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        check_same_run(checkpoint, INFO)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"seed": 1}, "seed: the checkpoint has 0, this config has 1"),
        ({"model": {"hidden_dim": 16}}, "model.hidden_dim: the checkpoint has 8, this config has 16"),
        ({"data_tokens": "xyz"}, "data_tokens: the checkpoint has 'abc', this config has 'xyz'"),
        (
            {"model": {"hidden_dim": 8, "use_bias": False}},
            "model.use_bias: the checkpoint has True (the default), this config has False",
        ),
        (
            {"data": {"format": {"type": "chat", "too_long": "drop"}}, "objective": {"label_smoothing": 0.1}},
            "data.format.type: the checkpoint has 'text' (the default), this config has 'chat'\n  "
            "data.format.too_long: the checkpoint has nothing, this config has 'drop'\n  "
            "objective.label_smoothing: the checkpoint has 0.0 (the default), this config has 0.1",
        ),
        ({"data_seed": 1}, "data_seed: the checkpoint has None (the default), this config has 1"),
        ({"lora": {"r": 4}}, "lora.r: the checkpoint has nothing, this config has 4"),
        ({"new": 1}, "new: the checkpoint has nothing, this config has 1"),
    ],
)
def test_another_run_is_refused_with_differences_and_advice(checkpoint, changes, line):
    with pytest.raises(UserError) as caught:
        check_same_run(checkpoint, changed("identity", **changes))
    message = str(caught.value)
    assert message.startswith(f"{checkpoint.path} belongs to another run\n  {line}\n")
    assert "trainer.id" in message


@pytest.mark.parametrize(
    ("part", "changes", "line"),
    [
        (
            "config",
            {"trainer": {"num_train_steps": 20}},
            "trainer.num_train_steps: the checkpoint has 10, this run has 20",
        ),
        ("machine", {"device": "tpu"}, "device: the checkpoint has 'cpu', this run has 'tpu'"),
        ("versions", {"jax": "2"}, "jax: the checkpoint has '1', this run has '2'"),
    ],
)
def test_other_changes_are_allowed_and_logged(checkpoint, caplog, part, changes, line):
    with caplog.at_level(logging.INFO):
        check_same_run(checkpoint, changed(part, **changes))
    assert caplog.messages == [f"changed since {checkpoint.path}: {line}"]


def with_schedule(steps, **optimizer):
    optimizer = {"type": "adam", "learning_rate": 1e-4, **optimizer}
    return INFO | {"config": {"trainer": {"num_train_steps": steps}, "optimizer": optimizer}}


def rate_warnings(tmp_path, caplog, step, saved, now):
    folder = tmp_path / f"step-{step}"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        check_same_run(Checkpoint(step, str(folder)), now)
    return [message for message in caplog.messages if "learning rate" in message]


def test_extending_a_finished_run_warns_that_the_learning_rate_rises(tmp_path, caplog):
    """At step 100 a cosine of 100 steps has decayed to a tenth; one of 200 steps is halfway."""
    saved, now = (with_schedule(steps, learning_rate=1e-3, warmup=0) for steps in (100, 200))
    (warning,) = rate_warnings(tmp_path, caplog, 100, saved, now)
    assert "rises from 0.0001 to 0.00055 after step 100" in warning
    assert "optimizer.decay" in warning


@pytest.mark.parametrize(
    ("step", "before", "after", "rates"),
    [
        (100, (200, {"warmup": 0}), (110, {"warmup": 0}), "0.000557 to 0.000118"),  # halfway, then near the end
        (150, (200, {"warmup": 0, "decay": 20}), (200, {"warmup": 0}), "0.001 to 0.000232"),
        (10, (200, {"warmup": 10}), (200, {"warmup": 100}), "0.0009 to 0.0001"),
        (10, (200, {"warmup": 0.1}), (400, {"warmup": 0.1}), "0.00045 to 0.00025"),
        (100, (200, {"warmup": 0}), (110, {"warmup": 0, "learning_rate": 5e-4}), "0.000557 to 5.91e-05"),
    ],
)
def test_a_learning_rate_that_drops_with_another_schedule_is_warned_about(tmp_path, caplog, step, before, after, rates):
    saved, now = (with_schedule(steps, **{"learning_rate": 1e-3, **optimizer}) for steps, optimizer in (before, after))
    (warning,) = rate_warnings(tmp_path, caplog, step, saved, now)
    assert f"drops from {rates} " in warning


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (100, {"lr_schedule": "constant"}, {"lr_schedule": "constant"}),
        (50, {"decay": 20}, {"decay": 20}),  # still at the peak
        (3, {"warmup": 10}, {"warmup": 10}),  # it rises in any case
        (60, {"learning_rate": 1e-3}, {"learning_rate": 2e-4}),
    ],
)
def test_a_learning_rate_that_continues_as_before_is_not_warned_about(tmp_path, caplog, step, before, after):
    saved = with_schedule(100, **{"warmup": 0, **before})
    assert rate_warnings(tmp_path, caplog, step, saved, with_schedule(200, **{"warmup": 0, **after})) == []
