"""Train a tiny model on meshes of simulated devices, and compare with one device. Called by test_context.py.

context_on_meshes.py OUTPUT CASE [CASE ...], each case JSON: {name, devices, model, trainer, data, lora, objective}.
Writes for each case the sizes of its mesh, the largest difference of the losses, and for each tensor the norm of the
difference of gradients, relative to the norm of the gradient on one device.
"""

import json
import os
import sys
import zlib

import jax
import numpy as np
import optax

from lmtrain.models.params import flatten
from lmtrain.run.config import RunConfig
from lmtrain.sharding.placement import LocalPart
from lmtrain.train.program.program import Program, build_program
from lmtrain.train.step.state import TrainState

VOCAB, LENGTH, BATCH, STEPS = 64, 64, 8, 2
MODEL = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH, "pad_vocab_to_multiple_of": 64}
OPTIMIZER = {"learning_rate": 1e-3, "warmup": 0, "max_grad_norm": None, "beta1": 0.5}


def batch(step: int, config: RunConfig) -> dict[str, np.ndarray]:
    """Random tokens and targets, and documents whose boundaries fall anywhere."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH))
    mask = (rng.random((BATCH, LENGTH)) < 0.7) & (np.arange(LENGTH) < LENGTH - 1)
    begins = rng.random((BATCH, LENGTH)) < 0.08
    begins[:, 0] = True
    documents = np.maximum.accumulate(np.where(begins, np.arange(LENGTH), 0), axis=1)
    whole = {"tokens": tokens, "loss_mask": mask, "segments": documents, "positions": np.arange(LENGTH) - documents}
    if config.data.has_pairs:
        whole["loss_mask"] = mask & ~np.roll(begins, -1, axis=1)
        whole["documents"] = np.cumsum(begins, axis=1) - 1
        whole["reference"] = np.where(begins, rng.normal(-10, 3, begins.shape), 0)
    return {name: whole[name].astype(dtype) for name, dtype in config.batch_types.items()}


# A teacher of other sizes than those of the students, in the folder of the results; its weights are random.
TEACHER = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
}


def random_state(program: Program) -> TrainState:
    """A state with parameters of numpy, which are the same on every mesh and compile nothing. Standard initial values
    are too small for differences of positions to matter, and adapters start at 0."""

    def values(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if name.startswith((".step", ".opt_state")):
            return np.zeros(leaf.shape, leaf.dtype)
        noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape) * 0.3
        return (noise + name.endswith("['scale']")).astype(leaf.dtype)

    return jax.device_put(jax.tree_util.tree_map_with_path(values, program.abstract), program.shardings)


def run(case: dict, devices: int, trainer: dict) -> tuple[list[float], dict[str, np.ndarray], dict[str, int], float]:
    groups = devices // trainer.get("context_axis_size", 1) // trainer.get("model_axis_size", 1)
    config = RunConfig(
        model={"type": "llama", **MODEL, **case.get("model", {})},
        trainer={
            "train_batch_size": BATCH,
            "num_train_steps": 10,
            "mp": "f32",
            "per_device_eval_parallelism": BATCH // groups,
        }
        | trainer,
        optimizer=OPTIMIZER,
        data={"tokenizer": "passthrough", "vocab_size": VOCAB, **case.get("data", {})},
        lora=case.get("lora"),
        objective=case.get("objective", {}),
        # the base, or the model to tune, is newly initialized
        initialize_from_hf="unused" if "lora" in case or "objective" in case else False,
    )
    program = build_program(config, VOCAB, jax.devices()[:devices])
    state = random_state(program)
    part = LocalPart.of(program.layout.batch, BATCH, LENGTH)
    losses = []
    for step in range(STEPS):
        state, metrics, _ = program.train_step(state, part.place(part.cut(batch(step, config))))
        losses.append(float(metrics["train/loss"]))
        if step == 0:
            gradients = {
                path: np.asarray(leaf) for path, leaf in flatten(optax.tree.get(state.opt_state, "mu")).items()
            }
    held = batch(9, config)
    total, tokens, _ = program.eval_step()(state.with_base(state.params), part.place(part.cut(held)))
    return losses, gradients, dict(program.layout.mesh.shape), float(total) / float(tokens)


def main() -> None:
    found, alone = {}, {}
    os.chdir(os.path.dirname(sys.argv[1]))
    os.makedirs("teacher", exist_ok=True)
    with open("teacher/config.json", "w") as file:
        json.dump(TEACHER, file)
    for number, case in enumerate(map(json.loads, sys.argv[2:])):
        # the first one before the same model is traced for one device
        split = run(case, case["devices"], case["trainer"]) if number == 0 else None
        key = json.dumps({name: case.get(name) for name in ("model", "data", "lora", "objective")})
        if key not in alone:
            alone[key] = run(case, 1, {})
        expected, gradients, _, evaluated = alone[key]
        losses, others, mesh, other = split or run(case, case["devices"], case["trainer"])
        errors = {
            path: float(np.linalg.norm(others[path] - own) / np.linalg.norm(own)) for path, own in gradients.items()
        }
        differences = [abs(a - b) for a, b in zip([*losses, other], [*expected, evaluated], strict=True)]
        found[case["name"]] = {"mesh": mesh, "loss": max(differences), "gradients": errors}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
