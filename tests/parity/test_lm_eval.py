"""Benchmarks give the results of lm-eval's own `hf` model on the exported model."""

import jax
import numpy as np
import pytest
from chat_tokenizer import write_chat_tokenizer
from conftest import TOKENIZER
from evaluation.local_tasks import write_tasks
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from models import quick

from lmtrain.evaluation.benchmarks.config import BenchmarkTask, EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.benchmarks.tasks import load_tasks
from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.write_export import build_export, gather_tensors, write_export

LENGTH = 64
FAMILIES = {
    "gpt2": {},
    "llama": {"num_kv_heads": 2, "intermediate_dim": 24},
    "mpt": {},
    "backpack": {"num_senses": 4},
    "mixture": {"num_kv_heads": 2, "moe": {"num_experts": 5, "experts_per_token": 2, "intermediate_dim": 12}},
}


# Two examples in each prompt.
SHOTS = BenchmarkTask(task="local_shots", num_fewshot=2)


LONG = ("gpt2", "mpt", "backpack", "mixture")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return EvalHarnessConfig(task_spec=write_tasks(folder, LENGTH), include_path=str(folder), log_samples=True)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_likelihoods_accuracies_and_texts_agree(tasks, tmp_path, monkeypatch, family):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokenizer, layout = load_tokenizer(str(TOKENIZER)), build_layout(PartitioningConfig())
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH, "gradient_checkpointing": False}
    config = RunConfig.model_validate(
        {"model": {"type": "llama" if family == "mixture" else family, **sizes, **FAMILIES[family]}}
    ).model
    model = build_model(config, tokenizer.vocab_size)
    params = quick.random_params(model, seed=7)
    plan = build_export(config, model, tokenizer, "float32")
    write_export(str(tmp_path / "hf"), plan, gather_tensors(params, plan.pieces, layout, model.vocab_size))

    context = Context(
        model=model,
        layout=layout,
        compute_dtype="float32",
        tokenizer=tokenizer,
        sets={},
        seq_len=LENGTH,
        batch_size=4,
        folder=str(tmp_path),
    )
    ours = Benchmarks(tasks, None)
    assert ours.prepare(context)
    found = ours.evaluate(jax.device_put(params), step=3)

    theirs = HFLM(
        str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4, max_length=LENGTH, trust_remote_code=True
    )
    expected = evaluate(theirs, load_tasks(tasks)[0], bootstrap_iters=0, log_samples=True)
    mine = samples(tmp_path / "lm_eval" / "step-3")
    for name, examples in expected["samples"].items():
        for here, there in zip(mine[name], examples, strict=True):
            assert here["doc_id"] == there["doc_id"]
            compare(here["resps"], there["resps"], name)
    for name, values in expected["results"].items():
        for metric in (key for key, value in values.items() if key.endswith(",none") and not isinstance(value, str)):
            assert found[f"{name}/{metric.removesuffix(',none')}"] == pytest.approx(values[metric], rel=1e-5), metric
    assert len({str(example["resps"]) for example in expected["samples"]["local_text"]}) > 3


def compare(ours, theirs, name):
    if name == "local_text":
        assert ours == theirs
        return
    for here, there in zip(np.ravel(np.array(ours, object)), np.ravel(np.array(theirs, object)), strict=True):
        if isinstance(there, bool):
            assert here == there
        else:
            assert abs(float(here) - float(there)) <= max(1e-3, 1e-5 * abs(float(there)))


def samples(folder):
    import json

    return {
        path.stem.removeprefix("samples_"): list(map(json.loads, path.read_text().splitlines()))
        for path in sorted(folder.glob("*.jsonl"))
    }


@pytest.mark.long
@pytest.mark.parametrize("multiturn", [False, True])
def test_likelihoods_of_chats_agree(tasks, tmp_path, multiturn):
    chat_tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer")))
    layout = build_layout(PartitioningConfig())
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": 128, "gradient_checkpointing": False}
    config = RunConfig.model_validate({"model": {"type": "llama", **sizes}}).model
    model = build_model(config, chat_tokenizer.vocab_size)
    params = quick.random_params(model, seed=7)
    plan = build_export(config, model, chat_tokenizer, "float32")
    write_export(str(tmp_path / "hf"), plan, gather_tensors(params, plan.pieces, layout, model.vocab_size))

    context = Context(
        model=model,
        layout=layout,
        compute_dtype="float32",
        tokenizer=chat_tokenizer,
        sets={},
        seq_len=128,
        batch_size=4,
        folder=str(tmp_path),
    )
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn, "task_spec": [SHOTS]}
    settings = tasks.model_copy(update=chat)
    ours = Benchmarks(settings, None)
    assert ours.prepare(context)
    ours.evaluate(jax.device_put(params), step=3)
    theirs = HFLM(str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4, max_length=128)
    expected = evaluate(
        theirs,
        load_tasks(settings)[0],
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
    )
    (mine,) = samples(tmp_path / "lm_eval" / "step-3").values()
    (there,) = expected["samples"].values()
    for here, other in zip(mine, there, strict=True):
        assert [list(pair) for pair in here["arguments"]] == [list(pair) for pair in other["arguments"]]
        assert "<|im_start|>assistant" in here["arguments"][0][0]
        compare(here["resps"], other["resps"], "local_choice")
