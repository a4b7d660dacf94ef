"""An evaluation that a signal ended is repeated, unless its metrics are logged."""

import json

import pytest

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.open import Trackers
from lmtrain.train.start.resume import EVALUATION_PENDING
from lmtrain.train.start.train_batches import is_pending


@pytest.mark.parametrize(
    ("info", "logged", "expected"),
    [
        ({EVALUATION_PENDING: True}, "train/loss", True),
        ({EVALUATION_PENDING: True}, "eval/accuracy/top1", False),  # it was killed between the log and the next save
        ({}, "train/loss", False),
    ],
)
def test_an_interrupted_evaluation_is_repeated_unless_its_metrics_are_logged(tmp_path, info, logged, expected):
    (tmp_path / "run.json").write_text(json.dumps(info))
    log = tmp_path / "run.metrics.jsonl"
    log.write_text(json.dumps({"step": 4, logged: 1.0}) + "\n")
    trackers = Trackers(JsonLog(str(log), 4))
    assert is_pending(Checkpoint(4, str(tmp_path)), trackers) == expected
    trackers.finish()
    assert not is_pending(None, Trackers())
