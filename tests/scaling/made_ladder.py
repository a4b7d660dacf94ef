"""A ladder whose runs exist as logs only, with losses by a known law."""

import json

import numpy as np
import yaml
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES

from lmtrain.commands.scaling import read_ladder
from lmtrain.scaling.fit import Law
from lmtrain.scaling.points import points, trials

LAW = Law(E=1.7, A=400.0, alpha=0.34, B=410.0, beta=0.28)
NOISE = 1e-3

BASE = {
    "data": {"train_urls": TRAIN_FILES, "validation_urls": VALIDATION_FILES, "tokenizer": str(TOKENIZER)},
    "model": {"type": "llama", "hidden_dim": 64, "intermediate_dim": 176, "num_heads": 4, "num_layers": 4}
    | {"seq_len": 32, "gradient_checkpointing": False},
    "trainer": {"train_batch_size": 4, "tracker": {"type": "json"}, "max_eval_batches": 4},
    "optimizer": {"learning_rate": 1e-2, "warmup": 0.05, "weight_decay": 0.1},
}
LADDER = {
    "config": "base",
    "sizes": [
        {"hidden_dim": 16 * heads, "intermediate_dim": 44 * heads, "num_heads": heads, "num_layers": heads}
        for heads in (1, 2, 3, 4)
    ],
    "tokens_per_parameter": [5, 10, 20],
}


def write_ladder(folder, base=None, **changes):
    """Write base.yaml and ladder.yaml. -> the path of the ladder"""
    (folder / "base.yaml").write_text(yaml.safe_dump(base or BASE | {"trainer": BASE["trainer"] | dirs(folder)}))
    path = folder / "ladder.yaml"
    path.write_text(yaml.safe_dump(LADDER | changes))
    return str(path)


def dirs(folder):
    return {"log_dir": str(folder / "logs"), "checkpointer": {"base_path": str(folder / "checkpoints")}}


def write_results(folder, path, best=1e-2, noise=NOISE, done=lambda point: True):
    """Write the logs of the runs that are `done`. Trials of another rate than `best` are 2 % worse."""
    ladder = read_ladder(path, None)
    rng = np.random.default_rng(0)
    runs = {point.id: point for point in [*trials(ladder), *points(ladder, [best] * len(ladder.sizes))]}
    for point in runs.values():
        if not done(point):
            continue
        loss = LAW.loss(point.parameters, point.tokens) * np.exp(noise * rng.standard_normal())
        write_log(folder, point, loss * (1.0 if point.rate == best else 1.02))
    return ladder


def write_log(folder, point, loss, steps=None):
    lines = [
        {"step": 0, "parameter_count": 1, "throughput/device_kind": "cpu", "throughput/device_count": 2},
        {"step": 1, "train/loss": 5.0, "throughput/gflops_per_second": 40.0},
        {"step": steps or point.steps, "eval/loss": loss, "throughput/gflops_per_second": 60.0},
        {"step": steps or point.steps, "checkpoint/blocking_seconds": 0.1},
    ]
    (folder / "logs").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "logs" / f"{point.id}.metrics.jsonl").write_text(text)
