"""The model as lm-eval sees it: limits of generation, and templates that fail. `tests/parity/test_lm_eval.py` compares
its answers with those of lm-eval's own model."""

import dataclasses

import pytest
from chat_tokenizer import write_chat_tokenizer
from evaluation.local_tasks import harness

from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.benchmarks.language_model import generation_limits
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.runtime.errors import UserError


def test_a_generation_has_the_limits_of_its_task_or_those_of_lm_eval():
    assert generation_limits("one", {"until": ["e", "ra"], "max_gen_toks": 20, "temperature": 0.0}, 64) == (
        20,
        ("e", "ra"),
    )
    assert generation_limits("one", {}, 512) == (256, ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, r"the task one samples \(temperature 0.7\), .* greedy decoding"),
        ({"num_beams": 4}, "the task one sets generation_kwargs num_beams: not supported"),
        ({"max_gen_toks": 64}, "the task one generates up to 64 tokens .* no room for a prompt in 64 tokens"),
    ],
)
def test_generations_that_are_not_greedy_or_leave_no_room_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        generation_limits("one", settings, 64)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "a\n{{ 1 / 0 }}",
            "eval_harness.apply_chat_template: the chat template fails: the chat template, line 2: division",
        ),
        ("a\n{{ 'a' * 10**10 }}", "the chat template, line 2: the chat template uses more than"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_an_error_with_its_line(gpt2, tmp_path, template, words):
    context, params = gpt2
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer", template)))
    one = Benchmarks(harness(tmp_path, "local_choice", apply_chat_template=True), None)
    one.prepare(dataclasses.replace(context, tokenizer=tokenizer))
    with pytest.raises(UserError) as caught:
        one.evaluate(params, 0)
    assert words in str(caught.value)
