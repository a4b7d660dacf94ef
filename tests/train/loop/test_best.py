"""The best evaluation so far: improvements, patience, and state that is resumed."""

import logging
import math

import pytest

from lmtrain.checkpoint.config import BestConfig
from lmtrain.evaluation.config import EarlyStoppingConfig
from lmtrain.train.loop.saver import BestSoFar, Decisions


def updates(best, values, first=1):
    return [best.update(step, {"eval/loss": value}) for step, value in enumerate(values, start=first)]


@pytest.mark.parametrize(
    ("settings", "values", "improved"),
    [
        ({}, [3.0, 2.0, 2.0, 2.5, 1.0], [True, True, False, False, True]),
        ({"mode": "max"}, [3.0, 2.0, 4.0], [True, False, True]),
        ({"min_delta": 0.5}, [3.0, 2.6, 2.5, 2.4], [True, False, False, True]),
        ({}, [math.nan, 3.0, math.nan, 2.0], [False, True, False, True]),
    ],
)
def test_an_improvement_exceeds_the_best_value_by_more_than_the_minimum(settings, values, improved):
    assert updates(BestSoFar(BestConfig(**settings)), values) == improved


def test_state_is_resumed_unless_the_metric_is_another_one():
    first = BestSoFar(BestConfig())
    updates(first, [3.0, 2.0, 2.5])
    assert first.state == {"metric": "eval/loss", "mode": "min", "value": 2.0, "step": 2, "waited": 1}
    again = BestSoFar(BestConfig(), first.state)
    assert updates(again, [2.2, 1.9], first=4) == [False, True]
    assert BestSoFar(BestConfig(mode="max"), first.state).value is None


def test_a_repeated_evaluation_of_the_best_step_is_still_the_best():
    first = BestSoFar(BestConfig())
    updates(first, [3.0])
    assert BestSoFar(BestConfig(), first.state).update(1, {"eval/loss": 3.0})


def test_the_run_ends_after_as_many_evaluations_without_an_improvement(caplog):
    decisions = Decisions(stop=EarlyStoppingConfig(patience=2))
    with caplog.at_level(logging.INFO, "lmtrain"):
        for step, value in enumerate([3.0, 3.1, 2.0, 2.1], start=1):
            decisions.update(step, {"eval/loss": value})
            assert not decisions.ends
        resumed = Decisions(stop=EarlyStoppingConfig(patience=2), saved=decisions.state)
        resumed.update(5, {"eval/loss": 2.0})
    assert resumed.ends
    assert "early stopping after step 5" in caplog.text
    assert Decisions(stop=EarlyStoppingConfig(patience=3), saved=resumed.state).ends is False


def test_a_metric_that_does_not_exist_is_reported_once_with_a_suggestion(caplog):
    best = BestSoFar(BestConfig(metric="eval/los"))
    with caplog.at_level(logging.WARNING, "lmtrain"):
        assert updates(best, [1.0, 0.5]) == [False, False]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "eval/los: " in message
    assert "did you mean eval/loss?" in message


def test_a_metric_that_is_always_nan_ends_the_run_with_a_message(caplog):
    decisions = Decisions(stop=EarlyStoppingConfig(patience=2))
    with caplog.at_level(logging.INFO, "lmtrain"):
        for step in (1, 2):
            decisions.update(step, {"eval/loss": math.nan})
    assert decisions.ends
    assert "without an improvement of eval/loss, which was NaN in every evaluation" in caplog.text
