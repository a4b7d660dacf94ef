"""Benchmarks as an evaluation of a run: names of metrics, what is refused, and what happens if a task fails."""

import logging

import pytest
from evaluation.local_tasks import harness

from lmtrain.evaluation.benchmarks.evaluator import Benchmarks, metrics_of
from lmtrain.evaluation.run import Evaluations
from lmtrain.runtime.errors import UserError


def test_metrics_have_the_names_of_tasks_and_no_standard_errors_in_training(gpt2, tmp_path):
    context, params = gpt2
    first = {"task": "local_choice", "task_alias": "mine"}
    config = harness(tmp_path, first, "local_perplexity", max_examples=3)
    evaluations = Evaluations([Benchmarks(config, 10)], context)
    found = evaluations.run(evaluations.due(10, 100), params, params, 10)
    names = {"mine/acc", "mine/acc_norm", "local_perplexity/word_perplexity", "local_perplexity/bits_per_byte"}
    assert found.metrics.keys() == {f"eval/{part}lm_eval/{name}" for part in ("", "ema/") for name in names}
    assert "mine/acc 0." in found.lines[0]
    with_errors = Benchmarks(config.model_copy(update={"bootstrap_iters": 10}), None)
    assert with_errors.prepare(context)
    assert "mine/acc_stderr" in with_errors.evaluate(params, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task_spec": ["local_choic"]}, ["  local_choic; did you mean local_choice"]),
        ({"include_path": "nowhere"}, ["eval_harness.include_path: nowhere"]),
        ({"max_eval_length": 129}, ["eval_harness.max_eval_length: 129", "128"]),
        ({"max_eval_length": 20}, ["local_text", "20 tokens"]),
        ({"apply_chat_template": True}, ["chat template"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_first_step(gpt2, tmp_path, settings, words):
    context, _ = gpt2
    config = harness(tmp_path, **settings)
    with pytest.raises(UserError) as caught:
        Evaluations([Benchmarks(config, 10)], context)
    for word in words:
        assert word in str(caught.value)


def test_a_task_that_fails_is_logged_and_training_continues(gpt2, tmp_path, caplog):
    context, params = gpt2
    config = harness(tmp_path, "local_choice")
    task = tmp_path / "local_choice.yaml"
    task.write_text(task.read_text().replace("doc_to_choice: '{{choices}}'", "doc_to_choice: '{{[]}}'"))
    evaluations = Evaluations([Benchmarks(config, 10)], context)
    with caplog.at_level(logging.ERROR, "lmtrain"):
        assert evaluations.run(evaluations.due(10, 100), params, None, 10).metrics == {}
    assert any("lm_eval" in record.getMessage() for record in caplog.records)


def test_numbers_of_tasks_and_groups_are_metrics_with_the_name_of_their_filter():
    results = {
        "results": {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "match,strict": 1}},
        "groups": {"all": {"acc,none": 0.25}},
    }
    assert dict(metrics_of(results, {"a": "mine"})) == {"mine/acc": 0.5, "mine/match/strict": 1.0, "all/acc": 0.25}
