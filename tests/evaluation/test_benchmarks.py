"""Benchmarks: scores and texts of a batch are those of each request alone, and what is refused."""

import dataclasses
import json
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CORPUS, TOKENIZER
from evaluation.local_tasks import write_tasks
from evaluation.test_samples import model_and_params

from lmtrain.config.errors import UserError
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.benchmarks.scorer import Question, Scorer, lengths
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.run import Evaluations
from lmtrain.generation.greedy import GreedyDecoder
from lmtrain.generation.sample import SamplingSettings, sample
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.runtime.signals import StoppedError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout

SIZES = {"seq_len": 128, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="module")
def gpt2():
    tokenizer = load_tokenizer(str(TOKENIZER))
    model, params = model_and_params(Gpt2Config(**SIZES), tokenizer.vocab_size)
    layout = plan_layout(PartitioningConfig())
    return Context(model, layout, "float32", tokenizer, {}, seq_len=128, batch_size=2), params


def harness(folder, *tasks, **settings):
    names = write_tasks(folder, 128)
    return EvalHarnessConfig(**{"task_spec": list(tasks) or names, "include_path": str(folder)} | settings)


def test_lengths_are_few_and_at_least_half_used():
    assert lengths(2048, 128) == [128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert lengths(1000, 128) == [128, 256, 384, 512, 768, 1000]
    assert lengths(24, 32) == [24]
    assert lengths(40, 32) == [32, 40]


def test_answers_do_not_depend_on_the_questions_next_to_them(gpt2):
    context, params = gpt2
    random = np.random.default_rng(0)
    questions = []
    for length, targets in ((1, 1), (5, 3), (5, 5), (40, 2), (128, 128), (128, 1), (100, 40), (31, 31), (33, 32)):
        tokens = tuple(random.integers(0, 300, length).tolist())
        questions += [Question(tokens, tuple(random.integers(0, 300, targets).tolist())) for _ in range(3)]
    each = list(dict.fromkeys(tokens for tokens, _ in questions))
    padded = np.array([tokens + (0,) * (128 - len(tokens)) for tokens in each])  # the model is causal
    found = jax.jit(lambda params: jax.nn.log_softmax(context.model.apply({"params": params}, padded)))(params)
    logits = {tokens: row[: len(tokens)] for tokens, row in zip(each, np.asarray(found), strict=True)}
    greedy = [Question(tokens, tuple(logits[tokens].argmax(-1)[-2:].tolist())) for tokens, _ in questions[3:6]]
    questions += greedy
    counted = []
    answers = Scorer(context).score(params, questions, counted.append)
    assert sum(counted) == len(questions)
    for (tokens, targets), answer in zip(questions, answers, strict=True):
        rows = logits[tokens][-len(targets) :]
        assert answer.log_likelihood == pytest.approx(rows[np.arange(len(targets)), targets].sum(), abs=1e-4)
        assert answer.is_greedy == (rows.argmax(-1).tolist() == list(targets))
    assert [answer.is_greedy for answer in answers[-3:]] == [True] * 3


def test_questions_about_the_same_tokens_share_a_sequence(gpt2, monkeypatch):
    context, params = gpt2
    scorer = Scorer(context)
    rows = []
    place = scorer._place
    monkeypatch.setattr(scorer, "_place", lambda *batch: (rows.extend(batch[0]), place(*batch))[1])
    scorer.score(params, [Question((1, 2, 3), (word,)) for word in range(40)] + [Question((1, 2), (3,))])
    assert sorted(len(row.questions) for row in rows) == [1, 8, 32]


def test_a_stop_request_ends_the_scoring_between_batches(gpt2):
    context, params = gpt2

    def stop():
        raise StoppedError

    with pytest.raises(StoppedError):
        Scorer(dataclasses.replace(context, check_stop=stop)).score(params, [Question((1,), (2,))])


@pytest.mark.parametrize(
    "config",
    [LlamaConfig, *(pytest.param(other, marks=pytest.mark.long) for other in (Gpt2Config, MptConfig, BackpackConfig))],
)
def test_greedy_texts_of_a_batch_are_those_of_each_prompt_alone(config):
    model, params = model_and_params(config(**SIZES), 40)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 40, length).tolist() for length in (90, 70, 66, 66)]
    settings = SamplingSettings(37, temperature=0)
    alone = [
        sample(model, params, jnp.array(prompt, jnp.int32), jax.random.key(0), settings, eos_id=None)
        for prompt in prompts
    ]
    decoder = GreedyDecoder(model, plan_layout(PartitioningConfig()), "float32")
    found = decoder(params, prompts, 37, 128, lambda row, new: False)
    assert found == alone
    soon = decoder(params, prompts, 37, 128, lambda row, new: len(new) >= 3)
    assert all(3 <= len(new) < 37 for new in soon)
    assert soon == [new[: len(short)] for new, short in zip(alone, soon, strict=True)]


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


def test_the_number_of_examples_in_a_prompt_is_that_of_the_task_then_of_the_run(gpt2, tmp_path):
    context, _ = gpt2
    config = harness(tmp_path, "local_choice", {"task": "local_text", "num_fewshot": 2}, num_fewshot=3)
    text = (tmp_path / "local_text.yaml").read_text()
    (tmp_path / "local_text.yaml").write_text(text.replace("num_fewshot: 0", "num_fewshot: 1\nfewshot_split: test"))
    one = Benchmarks(config, None)
    assert one.prepare(context)
    assert {name: task.get_config("num_fewshot") for name, task in one._tasks["tasks"].items()} == {
        "local_choice": 0,
        "local_text": 2,
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task_spec": ["local_choic"]}, ["local_choic'", "did you mean local_choice?"]),
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generation_kwargs: {do_sample: true, temperature: 0.7}", ["local_text", "temperature 0.7", "greedy"]),
        ("generation_kwargs: {num_beams: 4}", ["local_text", "num_beams"]),
        ("process_docs: !function code.run", ["local_text.yaml:1: ", "--confirm_run_unsafe_code"]),
        ("include: other.yaml", ["other.yaml:2: ", "--confirm_run_unsafe_code"]),
    ],
)
def test_tasks_that_sample_or_run_code_are_refused(gpt2, tmp_path, line, words):
    context, _ = gpt2
    config = harness(tmp_path, "local_text")
    kept = [part for part in (tmp_path / "local_text.yaml").read_text().splitlines() if "generation_kwargs" not in part]
    kept = [part for part in kept if not part.startswith(("  max_gen_toks", "  until", "  - "))]
    (tmp_path / "local_text.yaml").write_text("\n".join([line, *kept]) + "\n")
    (tmp_path / "code.py").write_text("raise SystemExit('code was run')")
    (tmp_path / "other.yaml").write_text("task: other\nprocess_docs: !function code.run\n")
    with pytest.raises(UserError) as caught:
        Benchmarks(config, None).prepare(context)
    for word in words:
        assert word in str(caught.value)


def test_code_of_a_task_runs_if_it_is_confirmed(gpt2, tmp_path):
    context, params = gpt2
    config = harness(tmp_path, "local_choice", confirm_run_unsafe_code=True)
    (tmp_path / "code.py").write_text("def run(docs):\n    return docs.select(range(2))\n")
    task = tmp_path / "local_choice.yaml"
    task.write_text(f"process_docs: !function code.run\n{task.read_text()}")
    one = Benchmarks(config, None)
    assert one.prepare(context)
    assert len(one._tasks["tasks"]["local_choice"].eval_docs) == 2
    assert one.evaluate(params, 0)


@pytest.mark.long  # the library reads all its tasks; so it does for the misspelt one above
def test_a_task_of_the_hub_without_a_network_fails_with_advice(gpt2):
    context, _ = gpt2
    config = EvalHarnessConfig(task_spec=["hellaswag"])
    with pytest.raises(UserError) as caught:
        Benchmarks(config, None).prepare(context)
    assert "hellaswag" in str(caught.value)
    assert "include_path" in str(caught.value)


def test_a_task_that_fails_is_logged_and_training_continues(gpt2, tmp_path, caplog):
    context, params = gpt2
    config = harness(tmp_path, "local_choice")
    task = tmp_path / "local_choice.yaml"
    task.write_text(task.read_text().replace("doc_to_choice: '{{choices}}'", "doc_to_choice: '{{[]}}'"))
    evaluations = Evaluations([Benchmarks(config, 10)], context)
    with caplog.at_level(logging.ERROR, "lmtrain"):
        assert evaluations.run(evaluations.due(10, 100), params, None, 10).metrics == {}
    assert any("lm_eval" in record.getMessage() for record in caplog.records)


SCRIPT = """
import os
from evaluation.test_samples import model_and_params
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
import jax, json, numpy as np
from lmtrain.evaluation.benchmarks.scorer import Question, Scorer
from lmtrain.evaluation.interface import Context
from lmtrain.generation.greedy import GreedyDecoder
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.models.params import abstract_params

random = np.random.default_rng(0)
draw = lambda count: tuple(random.integers(0, 90, count).tolist())
questions = [Question(draw(n), draw(min(n, 3))) for n in range(1, 60)] + [Question(draw(64), draw(64))]
prompts = [list(draw(n)) for n in range(3, 11)]
found = {}
for family in ("gpt2", "llama", "mpt", "backpack"):
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": 64}
    config = RunConfig.model_validate({"model": {"type": family, **sizes}}).model
    model, params = model_and_params(config, 90)
    for name, settings in {
        "one": None, "fsdp": {}, "tensor": {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads", "vocab"]}
    }.items():
        devices = jax.devices()[:1] if settings is None else None
        layout = plan_layout(PartitioningConfig(**(settings or {})), devices)
        placed = jax.device_put(params, parameter_shardings(layout, abstract_params(model)))
        context = Context(model, layout, "float32", None, {}, seq_len=64, batch_size=8)
        answers = Scorer(context).score(placed, questions)
        texts = GreedyDecoder(model, layout, "float32")(placed, prompts, 20, 64, lambda row, new: False)
        found[f"{family} {name}"] = [[a.log_likelihood for a in answers], [a.is_greedy for a in answers], texts]
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.multi_device
def test_on_meshes_scores_and_texts_are_those_of_one_device():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=CORPUS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len({str(text) for _, _, texts in found.values() for text in texts}) > 8
    for family in ("gpt2", "llama", "mpt", "backpack"):
        expected = found[f"{family} one"]
        for mesh in ("fsdp", "tensor"):
            likelihoods, *others = found[f"{family} {mesh}"]
            np.testing.assert_allclose(likelihoods, expected[0], rtol=1e-5, atol=1e-4)
            assert others == expected[1:]
