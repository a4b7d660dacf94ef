"""Runs of `lmtrain train` in processes of their own, on the text of tests/corpus as bytes, and what they leave."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

CORPUS = Path(__file__).parents[3] / "tests" / "corpus"
RUN = "one"


def start(folder: Path, model: dict[str, Any], trainer: dict[str, Any], **environment: str) -> subprocess.Popen:
    """Start the run of these settings in `folder`, or resume it."""
    folder.mkdir(exist_ok=True)
    settings = {
        "data": {
            "train_urls": [str(CORPUS / "train.1.jsonl"), str(CORPUS / "train.3.jsonl")],
            "tokenizer": "byte",
            "cache_dir": "cache",
            "shuffle": True,
        },
        "model": model,
        "trainer": {"id": RUN, "tracker": {"type": "json"}, **trainer},
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup": 0.1},
    }
    (folder / "run.json").write_text(json.dumps(settings))  # JSON is YAML
    with open(folder / "output.txt", "a") as output:
        command = [sys.executable, "-m", "lmtrain", "train", "run.json"]
        return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=output, stderr=output)


def finish(folder: Path, process: subprocess.Popen) -> None:
    """Wait for the end of a run, which must succeed."""
    if code := process.wait():
        raise RuntimeError(f"lmtrain train ended with code {code}: {(folder / 'output.txt').read_text()[-2000:]}")


def losses(folder: Path) -> list[tuple[int, float]]:
    """Each logged step with its loss, in the order of the log."""
    lines = map(json.loads, (folder / "logs" / f"{RUN}.metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def is_saved(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / RUN / f"step-{step}" / "manifest.json").exists()


def arrays(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of all parameters and optimizer states of a checkpoint, by name."""
    found = {}
    for part in ("params", "optimizer"):
        path = (folder / "checkpoints" / RUN / f"step-{step}" / part).absolute()
        handler = ocp.PyTreeCheckpointHandler()
        with ocp.Checkpointer(handler) as orbax, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the devices of the shardings in the file may not exist in this process
            to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
            leaves = jax.tree_util.tree_flatten_with_path(orbax.restore(path, restore_args=to_host))[0]
        found |= {f"{part}{jax.tree_util.keystr(name)}": np.asarray(leaf).tobytes() for name, leaf in leaves}
    return found
