"""Benchmarks as an evaluation of a run: names of metrics, what is refused, and what happens if a task fails."""

import dataclasses
import logging
import sys

import pytest
from chat_tokenizer import write_chat_tokenizer
from evaluation.local_tasks import harness

from lmtrain.evaluation.benchmarks.config import check_benchmarks
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks, metrics_of
from lmtrain.evaluation.benchmarks.language_model import generation_limits
from lmtrain.evaluation.run import Evaluations
from lmtrain.hf.tokenizer import load_tokenizer
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
        pytest.param(  # the library reads all its tasks
            {"task_spec": ["local_choic"]}, ["  local_choic; did you mean local_choice"], marks=pytest.mark.long
        ),
        ({"include_path": "nowhere"}, ["eval_harness.include_path: nowhere"]),
        ({"max_eval_length": 129}, ["eval_harness.max_eval_length: 129", "128"]),
        ({"max_eval_length": 20}, ["local_text", "20 tokens"]),
        ({"apply_chat_template": True}, ["chat template"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_first_step(gpt2, tmp_path, settings, words):
    context, _ = gpt2
    config = harness(tmp_path, **settings)
    with pytest.raises(UserError, match=".*".join(words)):
        Evaluations([Benchmarks(config, 10)], context)


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


def test_without_lm_eval_its_package_is_named(tmp_path, monkeypatch):
    config = harness(tmp_path)
    check_benchmarks(config)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install 'lm-eval"):
        check_benchmarks(config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"do_sample": True, "temperature": 0.7}, "0.7"), ({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 64}, "64")],
)
def test_generations_have_the_limits_of_the_task_and_those_not_greedy_or_without_room_are_refused(settings, named):
    limits = {"until": ["e", "ra"], "max_gen_toks": 20, "temperature": 0.0}
    assert (generation_limits("one", limits, 64), generation_limits("one", {}, 512)) == ((20, ("e", "ra")), (256, ()))
    with pytest.raises(UserError, match=f"the task one .*{named}"):
        generation_limits("one", settings, 64)


def test_a_template_that_fails_is_an_error_with_its_line(gpt2, tmp_path):
    context, params = gpt2
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer", "a\n{{ 1 / 0 }}")))
    one = Benchmarks(harness(tmp_path, "local_choice", apply_chat_template=True), None)
    one.prepare(dataclasses.replace(context, tokenizer=tokenizer))
    with pytest.raises(UserError, match=r"eval_harness\.apply_chat_template: .*line 2: division"):
        one.evaluate(params, 0)
