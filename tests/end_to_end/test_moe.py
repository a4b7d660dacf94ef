"""A mixture of experts from the command line: metrics, exports, adapters; and one run as a user has it, killed once."""

import json
import os

import numpy as np
import pytest
import torch
from conftest import logged, run_in_process, tiny_settings
from end_to_end.small_models import assert_resumes_with_the_same_bits, write
from evaluation.local_tasks import write_tasks
from faults import runs
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.tasks import load_tasks

pytestmark = pytest.mark.end_to_end

SIZES = {"hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
MOE = {"num_experts": 4, "experts_per_token": 2, "intermediate_dim": 16, "routed_scaling_factor": 1.7}


def moe_settings(**moe):
    settings = tiny_settings()
    settings["model"] = {"type": "llama", **SIZES, "seq_len": 32, "moe": {**MOE, **moe}}
    settings["trainer"] |= {"num_train_steps": 8, "id": "one", "watch": {"interval": 4}}
    return settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with moe.yaml, trained for 8 steps with an export after every fourth."""
    folder = tmp_path_factory.mktemp("moe")
    write(folder, "moe", moe_settings() | {"hf_save_path": "exports", "hf_save_steps": 4})
    run_in_process(["train", "moe.yaml"], folder, code=0)
    return folder


def test_metrics_of_the_load_are_logged(folder):
    assert all(1 <= load <= MOE["num_experts"] / MOE["experts_per_token"] for load in values(folder, "moe/max_load"))
    assert all(0 <= load <= 1 for load in values(folder, "moe/min_load"))
    assert all(0 <= entropy <= np.log(4) + 1e-6 for entropy in values(folder, "moe/router_entropy"))
    for layer in (0, 1):
        assert sorted(logged(folder, f"moe/max_load/blocks/{layer}")) == [4, 8]
    last = [logged(folder, f"moe/max_load/blocks/{layer}")[8] for layer in (0, 1)]
    assert max(last) == values(folder, "moe/max_load")[7]


def values(folder, name):
    found = logged(folder, name)
    assert list(found) == list(range(1, 9)), name
    return list(found.values())


def test_exports_during_training_are_those_of_the_command(folder):
    run_in_process(["export-hf", "moe.yaml", "--output", "model", "--verify"], folder, code=0)
    tensors = (folder / "model" / "model.safetensors").read_bytes()
    assert (folder / "exports/one/step-8/model.safetensors").read_bytes() == tensors
    assert json.loads((folder / "model/config.json").read_text())["model_type"] == "mixtral"


def test_an_export_is_the_same_model_with_and_without_the_factor_of_the_weights(folder):
    """Its matrices contain the factor, which a `config.json` of Mixtral has not."""
    expected = logged(folder, "eval/loss")[8]
    for flags in ([], ["--model.moe.routed_scaling_factor", "1.0"]):
        done = run_in_process(["eval", "moe.yaml", "--hf", "exports/one/step-8", *flags], folder, code=0)
        assert json.loads(done.stdout)["eval/loss"] == pytest.approx(expected, abs=1e-5)


def test_a_bias_that_balances_resumes_with_the_same_bits(folder):
    settings = moe_settings(router="sigmoid", bias_update_rate=0.01, shared_experts=1, dropout=0.1)
    settings["trainer"] |= {"id": "whole", "watch": {}, "steps_per_eval": 100}
    write(folder, "bias", settings)
    run_in_process(["train", "bias.yaml"], folder, code=0)
    arrays = runs.arrays(folder, 8, "whole")
    (bias,) = (arrays[name] for name in arrays if name.startswith("['params']") and "balance_bias" in name)
    steps = np.abs(bias) / 0.01
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert steps.max() >= 2
    assert_resumes_with_the_same_bits(folder, "bias.yaml", "whole")


@pytest.mark.long
def test_a_mixture_on_real_text_is_killed_resumed_exported_and_evaluated(tmp_path):
    """Its losses and parameters are those of a run that was not killed; transformers and lm-eval agree with it."""
    settings = moe_settings()
    settings["data"] = {"demo": "demo", "cache_dir": "cache", "shuffle": True}
    settings["model"]["seq_len"] = 64
    settings["trainer"] |= {"num_train_steps": 60, "train_batch_size": 8, "steps_per_eval": 30}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": [{"every": 10}]}
    for name in ("killed", "undisturbed"):
        runs.write_config(tmp_path / name, settings)
        for shared in ("demo", "cache"):
            (tmp_path / shared).mkdir(exist_ok=True)
            os.symlink(tmp_path / shared, tmp_path / name / shared)
    runs.finish(tmp_path / "undisturbed")
    killed = tmp_path / "killed"
    with runs.running(killed) as process:
        runs.wait_for(lambda: runs.last_logged(killed) >= 25, [process])
    assert 0 < runs.last_saved(killed) < 60
    assert f"resuming after step {runs.last_saved(killed)}" in runs.finish(killed)
    assert runs.differences(killed, tmp_path / "undisturbed", 60) == []
    losses = logged(killed, "eval/loss")
    assert losses[60] < losses[30] < np.log(8192)

    run_in_process(["export-hf", "tiny.json", "--trainer.id", "one", "--output", "model", "--verify"], killed, code=0)
    names = write_tasks(killed / "tasks", 64)
    flags = ["--tasks", ",".join(names), "--include_path", "tasks"]
    ours = json.loads(run_in_process(["eval", "tiny.json", "--trainer.id", "one", *flags], killed, code=0).stdout)
    theirs = lm_eval(killed, names)
    assert {f"eval/lm_eval/{name}": ours[f"eval/lm_eval/{name}"] for name in theirs} == {
        f"eval/lm_eval/{name}": pytest.approx(value, rel=1e-5) for name, value in theirs.items()
    }
    prompt = ["--prompt", "import ", "--temperature", "0", "--max_new_tokens", "8"]
    sample = run_in_process(["generate", "tiny.json", "--trainer.id", "one", *prompt], killed, code=0)
    assert greedy(killed / "model", "import ", 8) == sample.stdout.rstrip("\n")


def lm_eval(folder, names):
    """The metrics of lm-eval's own model of transformers."""
    model = HFLM(str(folder / "model"), device="cpu", dtype="float32", batch_size=4, max_length=64)
    config = EvalHarnessConfig(task_spec=names, include_path=str(folder / "tasks"))
    results = evaluate(model, load_tasks(config)[0], bootstrap_iters=0)["results"]
    return {
        f"{name}/{metric.removesuffix(',none')}": value
        for name, metrics in results.items()
        for metric, value in metrics.items()
        if metric.endswith(",none") and not isinstance(value, str) and "stderr" not in metric
    }


def greedy(folder, prompt, number):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=number, do_sample=False)
    return tokenizer.decode(out[0])
