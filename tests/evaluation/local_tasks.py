"""Small tasks of lm-eval with local data: multiple choice, perplexity of documents, and generation."""

import json
import random
from pathlib import Path

import yaml

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig

WORDS = ["the", "a", "quiet", "small", "robot", "café", "counts", "sees", "stars", "rain", "and", "then", "nothing"]
WORDS += ["happens", "today", "or", "not"]


def write_tasks(folder: Path, seq_len: int = 64) -> list[str]:
    """Write YAML files and data into `folder`. -> the names of the tasks; local_shots is multiple choice with examples.

    Contexts are empty, end in spaces, or have more than `seq_len` tokens; documents are shorter and longer than that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)

    def text(words: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(words))

    contexts = ["", "The robot ", "Rain:  ", text(seq_len), *(text(dice.randint(1, 8)) for _ in range(6))]
    choices = [["a", "b", "c"], ["the stars", "nothing happens", "rain"]]
    rows = [
        {"context": context, "choices": choices[number % 2], "answer": number % 3, "goal": dice.choice(WORDS)}
        for number, context in enumerate(contexts)
    ]
    _write(folder / "choices.jsonl", rows)
    _write(folder / "documents.jsonl", [{"text": text(words)} for words in (1, 4, 20, seq_len, 3 * seq_len)])
    base = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0, "metadata": {"version": 1}}
    data = {name: {"data_files": {"test": str(folder / f"{name}.jsonl")}} for name in ("choices", "documents")}
    tasks = {
        "local_choice": {
            "dataset_kwargs": data["choices"],
            "fewshot_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "local_perplexity": {
            "dataset_kwargs": data["documents"],
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "local_text": {
            "dataset_kwargs": data["choices"],
            "output_type": "generate_until",
            "doc_to_text": "{{context}} {{goal}}",
            "doc_to_target": "{{goal}}",
            "generation_kwargs": {"until": ["e", "ra"], "max_gen_toks": 20},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    shots = tasks["local_choice"] | {"num_fewshot": None}
    for name, settings in [*tasks.items(), ("local_shots", shots)]:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **base, **settings}))
    return list(tasks)


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def harness(folder: Path, *tasks: str | dict, **settings: object) -> EvalHarnessConfig:
    """The settings of these tasks, by default all of `write_tasks`, which writes them into `folder`."""
    names = write_tasks(folder, 128)
    return EvalHarnessConfig(**{"task_spec": list(tasks) or names, "include_path": str(folder)} | settings)
