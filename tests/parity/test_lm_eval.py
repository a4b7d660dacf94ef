"""Benchmarks give the results of lm-eval's own `hf` model on the exported model."""

import json

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
from lmtrain.weights.load_checkpoint import gather_tensors
from lmtrain.weights.write_export import build_export, write_export

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


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return EvalHarnessConfig(task_spec=write_tasks(folder, LENGTH), include_path=str(folder), log_samples=True)


def both(folder, family, tokenizer, settings, length, **options):
    """Our results and examples by task, and those of lm-eval's model of the export."""
    layout = build_layout(PartitioningConfig())
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": length, "gradient_checkpointing": False}
    kind = "llama" if family == "mixture" else family
    config = RunConfig.model_validate({"model": {"type": kind, **sizes, **FAMILIES[family]}}).model
    model = build_model(config, tokenizer.vocab_size)
    params = quick.random_params(model, seed=7)
    plan = build_export(config, model, tokenizer, "float32")
    write_export(str(folder / "hf"), plan, gather_tensors(params, plan.pieces, layout, model.vocab_size))

    context = Context(
        model=model,
        layout=layout,
        compute_dtype="float32",
        tokenizer=tokenizer,
        sets={},
        seq_len=length,
        batch_size=4,
        folder=str(folder),
    )
    ours = Benchmarks(settings, None)
    assert ours.prepare(context)
    found = ours.evaluate(jax.device_put(params), step=3)
    hf = str(folder / "hf")
    theirs = HFLM(hf, device="cpu", dtype="float32", batch_size=4, max_length=length, trust_remote_code=True)
    expected = evaluate(theirs, load_tasks(settings)[0], bootstrap_iters=0, log_samples=True, **options)
    mine = {
        path.stem.removeprefix("samples_"): list(map(json.loads, path.read_text().splitlines()))
        for path in sorted((folder / "lm_eval" / "step-3").glob("*.jsonl"))
    }
    return found, mine, expected


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "llama" else pytest.mark.long) for name in FAMILIES]
)
def test_likelihoods_accuracies_and_texts_agree(tasks, tmp_path, monkeypatch, family):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    found, mine, expected = both(tmp_path, family, load_tokenizer(str(TOKENIZER)), tasks, LENGTH)
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


@pytest.mark.long
@pytest.mark.parametrize("multiturn", [False, True])
def test_likelihoods_of_chats_agree(tasks, tmp_path, multiturn):
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer")))
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn}
    settings = tasks.model_copy(update=chat | {"task_spec": [SHOTS]})
    _, mine, expected = both(tmp_path, "llama", tokenizer, settings, 128, **chat)
    ((mine,), (there,)) = mine.values(), expected["samples"].values()
    for here, other in zip(mine, there, strict=True):
        assert [list(pair) for pair in here["arguments"]] == [list(pair) for pair in other["arguments"]]
        assert "<|im_start|>assistant" in here["arguments"][0][0]
        compare(here["resps"], other["resps"], "local_choice")
