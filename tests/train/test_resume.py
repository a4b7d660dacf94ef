"""Which checkpoint a run goes on from, and whether it is its own."""

import json
import logging

import pytest

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.config.errors import UserError
from lmtrain.train.resume import check_same_run

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


def test_the_same_run_is_accepted_in_silence(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        check_same_run(checkpoint, INFO)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"seed": 1}, "seed: the checkpoint has 0, this config has 1"),
        ({"model": {"hidden_dim": 16}}, "model.hidden_dim: the checkpoint has 8, this config has 16"),
        ({"data_tokens": "xyz"}, "data_tokens: the checkpoint has 'abc', this config has 'xyz'"),
        ({"new": 1}, "new: the checkpoint has nothing, this config has 1"),
    ],
)
def test_another_run_is_refused_with_what_differs_and_what_to_do(checkpoint, changes, line):
    with pytest.raises(UserError) as caught:
        check_same_run(checkpoint, changed("identity", **changes))
    message = str(caught.value)
    assert message.startswith(f"{checkpoint.path} is of another run\n  {line}\n")
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
def test_other_changes_are_allowed_and_said(checkpoint, caplog, part, changes, line):
    with caplog.at_level(logging.INFO):
        check_same_run(checkpoint, changed(part, **changes))
    assert caplog.messages == [f"changed since {checkpoint.path}: {line}"]
