"""Requests per second of benchmarks, compared with lm-eval's own `hf` model on the exported model, on this CPU.

    .venv/bin/python tools/bench/benchmarks.py [ROUNDS]

Both alternate in one process, on the same model (4 layers of width 256, float32) and local tasks: multiple choice,
perplexity of documents, and generation. `hf` uses batches of 32 requests. Times are medians over the rounds, after a
first round that compiles, which is printed separately.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.benchmarks.tasks import load_tasks, quiet
from lmtrain.evaluation.interface import Context
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.params import initializer
from lmtrain.models.registry import build_model
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_checkpoint import gather_tensors
from lmtrain.weights.write_export import build_export, write_export

LENGTH, BATCH = 256, 32
WORDS = ["the", "robot", "counts", "a", "quiet", "star", "and", "rain", "falls", "on", "small", "houses", "near"]
# name of the task: number of requests
REQUESTS = {"choice": 400, "perplexity": 20, "text": 32}


def write_tasks(folder: Path) -> None:
    dice = random.Random(0)

    def text(words: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(words))

    rows: dict[str, list[dict[str, Any]]] = {
        "choice": [
            {"context": text(dice.randint(5, 30)), "choices": [f" {text(4)}" for _ in range(4)], "answer": 0}
            for _ in range(REQUESTS["choice"] // 4)
        ],
        "perplexity": [{"text": text(dice.randint(20, 200))} for _ in range(REQUESTS["perplexity"])],
        "text": [{"context": text(dice.randint(5, 20)), "goal": ""} for _ in range(REQUESTS["text"])],
    }
    settings: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "text": {
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{goal}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, data in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, "test_split": "test", **settings[name]}))


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    tokenizer, layout = open_tokenizer("byte"), build_layout(PartitioningConfig())
    config = Gpt2Config(num_layers=4, hidden_dim=256, num_heads=4, seq_len=LENGTH, gradient_checkpointing=False)
    model = build_model(config, tokenizer.vocab_size)
    params = jax.tree.map(
        lambda box: box.value, initializer(model)(jax.random.key(0)), is_leaf=lambda x: hasattr(x, "value")
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tasks(folder)
        plan = build_export(config, model, tokenizer, "float32")
        write_export(str(folder / "hf"), plan, gather_tensors(params, plan.pieces, layout, model.vocab_size))
        theirs = HFLM(str(folder / "hf"), device="cpu", dtype="float32", batch_size=BATCH, max_length=LENGTH)
        context = Context(
            model=model,
            layout=layout,
            compute_dtype="float32",
            tokenizer=tokenizer,
            sets={},
            seq_len=LENGTH,
            batch_size=BATCH,
        )
        for name, requests in REQUESTS.items():
            settings = EvalHarnessConfig(task_spec=[name], include_path=temporary)
            ours = Benchmarks(settings, None)
            ours.prepare(context)
            task = load_tasks(settings)[0]

            def run_theirs(task: Any = task) -> None:
                with quiet():
                    evaluate(theirs, task, bootstrap_iters=0)

            def run_ours(ours: Benchmarks = ours) -> None:
                ours.evaluate(params, 0)

            first = timed(run_ours), timed(run_theirs)
            times = [(timed(run_ours), timed(run_theirs)) for _ in range(rounds)]
            here, there = (median(column) for column in zip(*times, strict=True))
            print(
                f"{name}: {requests / here:.1f} requests/s, hf {requests / there:.1f}: {there / here:.2f} x "
                f"(first round {first[0]:.1f} and {first[1]:.1f} s)"
            )


if __name__ == "__main__":
    main()
