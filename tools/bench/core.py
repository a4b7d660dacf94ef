"""nanochat's `core_eval` and lmtrain on one exported model: the accuracy of each task of CORE, and the metric.

    git clone https://github.com/karpathy/nanochat
    .venv/bin/python tools/bench/core.py nanochat eval_bundle my_model [--max_examples 100]

`my_model` is an export with its tokenizer, which transformers reads for nanochat's side, in float32 on this CPU. Both
take the same items. Prints both accuracies of each task, and exits with 1 if one differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


def nanochat(clone: Path, bundle: Path, folder: Path, limit: int) -> dict[str, float]:
    """Each task's accuracy by nanochat's `evaluate_task`; its metric comes from `evaluate_core` in the same way."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = types.ModuleType("core_eval")
    exec((clone / "nanochat" / "core_eval.py").read_text(), module.__dict__)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    library = AutoTokenizer.from_pretrained(folder)

    class Model:
        max_seq_len = model.config.max_position_embeddings

        def __call__(self, ids: Any) -> Any:
            return model(ids).logits

    class Tokenizer:
        def get_bos_token_id(self) -> int:
            number: int = library.eos_token_id if library.bos_token_id is None else library.bos_token_id
            return number

        def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
            return [[prepend, *library.encode(text, add_special_tokens=False)] for text in texts]

    found = {}
    for task in yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"]:
        lines = (bundle / "eval_data" / task["dataset_uri"]).read_text().splitlines()
        items = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(items)
        kind = {
            "task_type": task["icl_task_type"],
            "num_fewshot": task["num_fewshot"][0],
            "continuation_delimiter": task.get("continuation_delimiter", " "),
        }
        found[task["label"]] = module.evaluate_task(Model(), Tokenizer(), items[:limit], "cpu", kind)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, text in (("clone", "a clone of nanochat"), ("bundle", "tasks of CORE"), ("model", "an export")):
        parser.add_argument(name, type=Path, help=text)
    parser.add_argument("--max_examples", type=int, default=100)
    arguments = parser.parse_args()
    limit = arguments.max_examples
    flags = ["--hf", arguments.model, "--core", arguments.bundle, "--max_examples", limit]
    command = [sys.executable, "-m", "lmtrain", "eval", *map(str, flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    ours = {name.removeprefix("eval/core/"): value for name, value in json.loads(done.stdout).items()}
    theirs = nanochat(arguments.clone, arguments.bundle, arguments.model, limit)
    for label, accuracy in theirs.items():
        print(f"{label:32} {accuracy:.6f} {ours[label]:.6f}")
    different = [label for label, accuracy in theirs.items() if abs(accuracy - ours[label]) > 1e-6]
    print(f"CORE {ours['metric']:.6f}; {len(different)} of {len(theirs)} tasks differ {' '.join(different)}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
