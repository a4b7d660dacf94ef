"""When evaluations run, with which parameters, and what happens if one fails or the run has to stop."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.perplexity import Perplexity
from lmtrain.evaluation.run import Evaluations, build_evaluators
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.signals import StoppedError

NOTHING = Context(model=None, layout=None, compute_dtype="float32", tokenizer=None, sets={}, seq_len=32)


@dataclasses.dataclass
class Doubling:
    """Twice the parameters, which are a single number."""

    name: str = "double"
    every: int | None = 10
    optional: bool = True
    has_work: bool = True
    error: type[Exception] | None = None

    def prepare(self, context):
        self.context = context
        return self.has_work

    def evaluate(self, params, step):
        if self.error:
            raise self.error("no such thing")
        return {"value": 2.0 * params, "step": float(step)}

    def describe(self, metrics):
        return f"{self.name}: {metrics}"


def test_metric_names_contain_the_evaluator_and_mark_averaged_parameters():
    evaluations = Evaluations([Doubling(), Doubling(name="")], NOTHING)
    metrics, lines, _ = evaluations.run(evaluations.due(10, 100), 1.0, 3.0, 10)
    values = {"eval/double/value": 2.0, "eval/ema/double/value": 6.0, "eval/value": 2.0, "eval/ema/value": 6.0}
    assert {name: value for name, value in metrics.items() if "value" in name} == values
    assert metrics["eval/double/step"] == 10.0
    assert [line.split(":")[0] for line in lines] == ["double", ""]
    assert "eval/ema/double/value" in lines[0]
    assert not [name for name in evaluations.run(evaluations.due(10, 100), 1.0, None, 10)[0] if "ema" in name]


def test_each_has_its_interval_and_all_run_after_the_last_step():
    often, rarely, at_the_end = Doubling("often", 2), Doubling("rarely", 5), Doubling("end", None)
    evaluations = Evaluations([often, rarely, at_the_end, Doubling("idle", 1, has_work=False)], NOTHING)
    due = [[one.name for one in evaluations.due(step, 11)] for step in range(1, 12)]
    both = ["often", "rarely"]
    assert due == [[], ["often"], [], ["often"], ["rarely"], ["often"], [], ["often"], [], both, [*both, "end"]]
    assert [evaluations.next_after(step, 11) for step in (0, 2, 4, 10, 11)] == [2, 4, 5, 11, None]
    assert Evaluations([at_the_end], NOTHING).next_after(0, 11) == 11
    assert Evaluations([], NOTHING).next_after(0, 11) is None


def test_an_optional_evaluator_that_fails_is_logged_and_the_others_run(caplog):
    evaluations = Evaluations([Doubling("broken", error=KeyError), Doubling()], NOTHING)
    with caplog.at_level(logging.ERROR, "lmtrain"):
        metrics, lines, _ = evaluations.run(evaluations.due(10, 100), 1.0, None, 10)
    assert set(metrics) == {"eval/double/value", "eval/double/step"}
    assert len(lines) == 1
    assert all(part in caplog.text for part in ("broken", "step 10", "KeyError: 'no such thing'"))


def test_a_required_evaluator_that_fails_ends_the_run_and_so_does_a_stop():
    for evaluator in (Doubling(error=KeyError, optional=False), Doubling(error=StoppedError)):
        evaluations = Evaluations([evaluator], NOTHING)
        with pytest.raises(evaluator.error):
            evaluations.run([evaluator], 1.0, None, 10)


def test_perplexity_is_evaluated_if_there_are_validation_sets():
    evaluator, preferences = build_evaluators(EvaluationConfig(steps_per_eval=7))
    assert isinstance(evaluator, Perplexity)
    assert not preferences.prepare(SimpleNamespace(loss=CrossEntropy(), sets={"": []}))  # no answers to compare
    assert (evaluator.every, evaluator.optional, evaluator.name) == (7, False, "")
    nothing = EvaluationConfig(steps_per_eval=None)
    assert build_evaluators(nothing) == []
    assert (EvaluationConfig().evaluates, nothing.evaluates) == (True, False)


class Broken(Doubling):
    def prepare(self, context):
        raise ValueError("no such benchmark")


def test_an_optional_evaluator_that_cannot_be_prepared_is_logged_and_disabled(caplog):
    evaluations = Evaluations([Broken("bench"), Doubling()], NOTHING)
    assert [one.name for one in evaluations.due(10, 100)] == ["double"]
    assert all(part in caplog.text for part in ("bench", "ValueError: no such benchmark"))
    with pytest.raises(ValueError, match="no such benchmark"):
        Evaluations([Broken("bench", optional=False)], NOTHING)


def test_an_evaluator_may_not_have_the_name_of_a_validation_set():
    context = dataclasses.replace(NOTHING, sets={"double": [], "": []})
    with pytest.raises(UserError, match=r"^data\.configs: double .*rename the source"):
        Evaluations([Doubling()], context)
    assert Evaluations([Doubling("")], context).due(10, 100)
