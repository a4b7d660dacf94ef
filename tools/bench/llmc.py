"""llm.c's `train_gpt2.py` and lmtrain from the same weights on the same batches: losses, gradient norms.

    git clone https://github.com/karpathy/llm.c
    .venv/bin/python tools/bench/llmc.py llm.c [--steps 20]

Both train GPT-2 124M in float32 on this CPU with the optimizer of configs/recipes/gpt2_124m.yaml at a constant rate,
since llm.c's warmup begins one step later. Batches are 4 x 64 random ids of a Zipf distribution, in llm.c's format.
The norm of llm.c's gradients is summed in float64 here: torch's sum of 38 M squares in float32 is off by 5e-5, and
clips with it. Prints both losses and norms of each step, and the largest differences.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from reproduce import ROOT, in_llm_c_format

ROWS, LENGTH, VOCAB = 4, 64, 50257
RATE, DECAY = 6e-4, 0.1
CLIP = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)"
EXACT_CLIP = """norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.grad_clip, norm.float())"""
Steps = list[tuple[float, float]]


def write_ids(path: Path, steps: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.2, (steps + 1) * ROWS * LENGTH + 1) % VOCAB).astype("<u2")
    path.write_bytes(in_llm_c_format(ids))
    return ids


def llm_c(program: str, folder: Path, steps: int) -> Steps:
    """Run train_gpt2.py, which keeps its initial weights in `initial.pt` here and needs no tokenizer."""
    program = program.replace("import tiktoken\n", "\n").replace('tiktoken.get_encoding("gpt2")', "None")
    begin = "    model.train()\n    model.to(device)\n"
    assert begin in program
    assert CLIP in program
    program = program.replace(CLIP, EXACT_CLIP).replace(
        begin, '    torch.save(model.state_dict(), "initial.pt")\n' + begin
    )
    (folder / "train_gpt2.py").write_text(program)
    flags = {
        "input_bin": "ids.bin", "model": "d12", "device": "cpu", "batch_size": ROWS, "sequence_length": LENGTH,
        "total_batch_size": ROWS * LENGTH, "num_iterations": steps, "learning_rate": RATE, "weight_decay": DECAY,
        "overfit_single_batch": 0, "write_tensors": 0,
    }  # fmt: skip
    command = [sys.executable, "train_gpt2.py", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = re.findall(r"train loss ([\d.]+) \| norm ([\d.]+)", done.stdout)
    assert len(found) == steps, done.stderr
    return [(float(loss), float(norm)) for loss, norm in found]


def write_hf(folder: Path) -> None:
    """The initial weights as a folder of transformers, whose matrices are transposed."""
    import torch
    from safetensors.torch import save_file

    saved = torch.load(folder / "initial.pt", weights_only=True)
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors = {
        name: (tensor.t() if name.endswith(matrices) else tensor).contiguous()
        for name, tensor in saved.items()
        if not name.endswith(".attn.bias") and name != "lm_head.weight"
    }
    (folder / "hf").mkdir()
    save_file(tensors, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))


def lmtrain(ids: np.ndarray, folder: Path, steps: int) -> Steps:
    import jax.numpy as jnp
    from nano_step import build_step

    from lmtrain.config.load import load_config
    from lmtrain.run.config import RunConfig
    from lmtrain.weights.load_hf import load_hf_params

    config = load_config(RunConfig, str(ROOT / "configs/recipes/gpt2_124m.yaml")).config
    adam = config.optimizer.model_copy(update={"lr_schedule": "constant", "warmup": 0})
    model, layout, state, step = build_step(config.model, adam, VOCAB, ROWS)
    state = state.replace(params=load_hf_params(str(folder / "hf"), config.model, model, layout, "float32"))
    mask = np.ones((ROWS, LENGTH + 1), bool)
    mask[:, -1] = False  # the last token of a row is a target only
    found = []
    for number in range(steps):
        begin = number * ROWS * LENGTH
        rows = [ids[begin + row * LENGTH : begin + (row + 1) * LENGTH + 1] for row in range(ROWS)]
        batch = {"tokens": jnp.asarray(np.stack(rows), jnp.int32), "loss_mask": jnp.asarray(mask)}
        state, metrics, _ = step(state, batch)
        found.append((float(metrics["train/loss"]), float(metrics["train/gradient_norm"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llmc", type=Path, help="a clone of llm.c")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = write_ids(folder / "ids.bin", arguments.steps)
        theirs = llm_c((arguments.llmc / "train_gpt2.py").read_text(), folder, arguments.steps)
        write_hf(folder)
        ours = lmtrain(ids, folder, arguments.steps)
    for number, ((loss, norm), (own_loss, own_norm)) in enumerate(zip(theirs, ours, strict=True), 1):
        print(f"step {number:3}  loss {loss:.6f} {own_loss:.6f}  norm {norm:.4f} {own_norm:.4f}")
    losses = max(abs(loss - own) for (loss, _), (own, _) in zip(theirs, ours, strict=True))
    norms = max(abs(norm - own) / norm for (_, norm), (_, own) in zip(theirs, ours, strict=True))
    print(f"largest difference: loss {losses:.1e}, norm {norms:.1e} of it")


if __name__ == "__main__":
    main()
