"""modded-nanogpt's baseline of track 3 and lmtrain from the same weights on the same batches: the loss of each step.

    git clone https://github.com/KellerJordan/modded-nanogpt
    .venv/bin/python tools/bench/track_3.py modded-nanogpt [--steps 20]

Both train in float32 on this CPU: `train_gpt_simple.py` with the changes below, 4 layers of 256 instead of 12 of 768,
and configs/recipes/muon_124m.yaml with these sizes. Batches are 4 x 64 random ids of a Zipf distribution. Prints both
losses of each step, and the largest difference.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from llmc import LENGTH, ROWS, VOCAB, write_ids
from reproduce import ROOT

LAYERS, WIDTH, HEAD = 4, 256, 128
RANGE = 0.33**0.5
CHANGES = {
    "seq_len=1024": f"seq_len={LENGTH}",
    ", pin_memory=True": "",
    'device="cuda", ': "",
    ".bfloat16()\n        self.blocks": "\n        self.blocks",
    "X = G.bfloat16()": "X = G",
    "@torch.compile\n": "",
    'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\ntorch.cuda.set_device(device)\n': "",
    'backend="nccl", device_id=device': 'backend="gloo"',
    " on {torch.cuda.get_device_name(device)}": "",
    "val_tokens = 20 * 524288": f"val_tokens = {ROWS * LENGTH}",
    "batch_size = 8 * 64 * 1024": f"batch_size = {ROWS * LENGTH}",
    "mbs = 64": f"mbs = {ROWS}",
    "data/fineweb10B/fineweb_val_*.bin": "ids.bin",
    "data/fineweb10B/fineweb_train_*.bin": "ids.bin",
    "num_layers=12, model_dim=768).cuda()": f"num_layers={LAYERS}, model_dim={WIDTH})",
    "model.compile(dynamic=False)\n": "",
    ", fused=True": "",
    "    # create the optimizer(s)\n": '    torch.save(model.state_dict(), "initial.pt")\n',
    "        model(inputs[i*mbs:(i+1)*mbs], targets[i*mbs:(i+1)*mbs]).backward()": """
            loss = model(inputs[i*mbs:(i+1)*mbs], targets[i*mbs:(i+1)*mbs])
            loss.backward()
            print(f"loss of step {step} {loss.item() / inputs.numel():.8f}")""",
}


def script(program: str, folder: Path, steps: int) -> list[float]:
    """The losses of train_gpt_simple.py, which keeps its initial weights in `initial.pt`."""
    for old, new in CHANGES.items():
        assert old in program, old
        program = program.replace(old, new)
    program = program.replace("        # --------------- TRAINING", f"        if step == {steps}: break\n        # ---")
    (folder / "train.py").write_text(program)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29541",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    found = re.findall(r"loss of step \d+ ([\d.]+)", done.stdout)
    assert len(found) == steps, done.stderr[-2000:]
    return list(map(float, found))


def read_params(folder: Path) -> dict[str, np.ndarray]:
    """The initial weights by lmtrain's paths. There the first half of a head is rotated, in the other direction: the
    script rotates dimension t of its first half with t of its second, for t below a quarter."""
    import torch

    saved = {name: value.numpy() for name, value in torch.load(folder / "initial.pt", weights_only=True).items()}
    heads, quarter = WIDTH // HEAD, HEAD // 4
    order = np.concatenate([np.arange(quarter) + quarter * part for part in (2, 0, 1, 3)])

    def stacked(name: str) -> np.ndarray:
        return np.stack([saved[f"blocks.{layer}.{name}"] for layer in range(LAYERS)])

    params = {
        "tokens/embedding": saved["embed.weight"],
        "norm_tokens/scale": saved["norm1.gains"],
        "norm_final/scale": saved["norm2.gains"],
        "unembed/embedding": saved["proj.weight"],
        "unembed/bias": saved["proj.bias"],
        "blocks/norm_attn/scale": stacked("norm1.gains"),
        "blocks/norm_mlp/scale": stacked("norm2.gains"),
        "blocks/attn/out/kernel": stacked("attn.proj.weight").swapaxes(1, 2).reshape(LAYERS, heads, HEAD, WIDTH),
        "blocks/attn/out/bias": stacked("attn.proj.bias"),
    }
    for ours, theirs in (("up", "fc"), ("down", "proj")):
        params[f"blocks/mlp/{ours}/kernel"] = stacked(f"mlp.{theirs}.weight").swapaxes(1, 2)
        params[f"blocks/mlp/{ours}/bias"] = stacked(f"mlp.{theirs}.bias")
    for name in "qkv":
        kernel = stacked(f"attn.{name}.weight").swapaxes(1, 2).reshape(LAYERS, WIDTH, heads, HEAD)
        bias = stacked(f"attn.{name}.bias").reshape(LAYERS, heads, HEAD)
        rotated = order if name in "qk" else np.arange(HEAD)
        params |= {f"blocks/attn/{name}/kernel": kernel[..., rotated], f"blocks/attn/{name}/bias": bias[..., rotated]}
    return params


def lmtrain(ids: np.ndarray, folder: Path, steps: int) -> list[float]:
    import jax
    import jax.numpy as jnp
    from nano_step import build_step

    from lmtrain.config.load import load_config
    from lmtrain.models.params import flatten, unflatten
    from lmtrain.run.config import RunConfig

    tokens = ROWS * LENGTH
    settings: dict[str, Any] = {
        "model.num_layers": LAYERS,
        "model.hidden_dim": WIDTH,
        "model.intermediate_dim": 4 * WIDTH,
        "model.num_heads": WIDTH // HEAD,
        "model.initializer_range": RANGE / WIDTH**0.5,
        "optimizer.epsilon": 1e-10 / tokens,
        "optimizer.muon_epsilon": 1e-7 / tokens,
        "optimizer.lr_schedule": "constant",
        "optimizer.decay": "null",
        "optimizer.min_lr_ratio": 0.1,
    }
    overrides = [(name, str(value)) for name, value in settings.items()]
    config = load_config(RunConfig, str(ROOT / "configs/recipes/muon_124m.yaml"), overrides).config
    _, _, state, step = build_step(config.model, config.optimizer, 50304, ROWS)
    given, like = read_params(folder), flatten(state.params)
    assert {path: value.shape for path, value in given.items()} == {path: value.shape for path, value in like.items()}
    state = state.replace(params=jax.tree.map(jnp.asarray, unflatten(given)))
    mask = np.ones((ROWS, LENGTH + 1), bool)
    mask[:, -1] = False  # the last token of a row is a target only
    found = []
    for number in range(steps):
        begin = number * tokens
        rows = [ids[begin + row * LENGTH : begin + (row + 1) * LENGTH + 1] for row in range(ROWS)]
        batch = {"tokens": jnp.asarray(np.stack(rows), jnp.int32), "loss_mask": jnp.asarray(mask)}
        state, metrics, _ = step(state, batch)
        found.append(float(metrics["train/loss"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="a clone of modded-nanogpt")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    program = (arguments.clone / "records/track_3_optimization/train_gpt_simple.py").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = write_ids(folder / "ids.bin", arguments.steps)
        theirs = script(program, folder, arguments.steps)
        ours = lmtrain(ids, folder, arguments.steps)
    for number, (loss, own) in enumerate(zip(theirs, ours, strict=True), 1):
        print(f"step {number:3}  loss {loss:.6f} {own:.6f}")
    print(f"largest difference: {max(abs(loss - own) for loss, own in zip(theirs, ours, strict=True)):.1e}")


if __name__ == "__main__":
    assert VOCAB < 50304
    main()
