"""Train a tiny model on several meshes of 8 simulated devices, and write the results. Called by test_matrix.py.

train_on_meshes.py OUTPUT CASE [CASE ...], each case JSON: {name, steps, model, trainer, optimizer, data, objective,
z_loss_weight, lora, tokens}
"""

import json
import sys
from collections.abc import Iterable

import jax
import numpy as np

from lmtrain.compiled.figures import measure
from lmtrain.models.params import flatten
from lmtrain.plan.figures import network_of
from lmtrain.run.config import RunConfig
from lmtrain.sharding.placement import LocalPart
from lmtrain.train.program.program import build_program

VOCAB, LENGTH, BATCH = 64, 16, 16
MODEL = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH, "pad_vocab_to_multiple_of": 64}
OPTIMIZER = {"learning_rate": 1e-2, "warmup": 2, "weight_decay": 0.1}


def batch(step: int, names: Iterable[str], vocab: int) -> dict[str, np.ndarray]:
    """Predictable tokens with uneven numbers of targets, two documents per sequence, and loss weights by row."""
    rng = np.random.default_rng(step)
    start = rng.integers(0, vocab, (BATCH, 1))
    tokens = (start + np.arange(LENGTH) * rng.integers(1, 3, (BATCH, 1))) % vocab
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH, (BATCH, 1))
    segments, positions = (part * np.ones((BATCH, 1), int) for part in divmod(np.arange(LENGTH), LENGTH // 2))
    whole = {"tokens": tokens, "loss_mask": mask, "segments": segments, "positions": positions}
    whole["loss_weights"] = np.repeat(np.arange(BATCH)[:, None] % 3, LENGTH, axis=1)
    types = {"loss_mask": bool, "loss_weights": np.float32}
    return {name: whole[name].astype(types.get(name, np.int32)) for name in names}


def run(case: dict) -> dict:
    vocab = case.get("tokens", VOCAB)
    config = RunConfig(
        model={"type": "gpt2", **MODEL, **case.get("model", {})},
        trainer={"train_batch_size": BATCH, "num_train_steps": case["steps"], **case.get("trainer", {})},
        optimizer={**OPTIMIZER, **case.get("optimizer", {})},
        data={"tokenizer": "passthrough", "vocab_size": vocab, **case.get("data", {})},
        objective=case.get("objective", {}),
        z_loss_weight=case.get("z_loss_weight", 0.0),
        lora=case.get("lora"),
        initialize_from_hf="unused" if "lora" in case else False,  # the base is newly initialized
    )
    program = build_program(config, vocab, jax.devices()[: case.get("devices", 8)])
    compiled = program.compile()
    state = program.init()
    part = LocalPart.of(program.layout.batch, BATCH, LENGTH)
    losses, norms = [], []
    for step in range(case["steps"]):
        arrays = batch(step, config.batch_types, vocab)
        state, metrics, _ = compiled(state, part.place(arrays))
        losses.append(float(metrics["train/loss"]))
        norms.append(float(metrics["train/gradient_norm"]))
    found = {"losses": losses, "norms": norms}
    if case.get("inspect"):
        collectives = measure(compiled.as_text(), network_of(program.layout, None)).collectives
        found["collectives"] = [[c.kind, c.bytes, [list(shape) for shape in c.shapes]] for c in collectives]
        found["whole"] = {path: list(leaf.shape) for path, leaf in flatten(program.abstract.params).items()}
        found["optimizer"] = [
            [jax.tree_util.keystr(path), leaf.size, int(np.prod(leaf.sharding.shard_shape(leaf.shape)))]
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        ]
    return found


def main() -> None:
    cases = [json.loads(text) for text in sys.argv[2:]]
    with open(sys.argv[1], "w") as file:
        json.dump({case["name"]: run(case) for case in cases}, file)


if __name__ == "__main__":
    main()
