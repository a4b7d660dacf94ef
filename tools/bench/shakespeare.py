"""nanoGPT's character-level run for a CPU in nanoGPT and in lmtrain, and a modern recipe of the same size, in turns.

    git clone https://github.com/karpathy/nanoGPT
    .venv/bin/python tools/bench/shakespeare.py nanoGPT input.txt [--seeds 3]

`input.txt` is Tiny Shakespeare (`tools/reproduce.sh` downloads it). Every program trains once per seed, from the start
of its process to the end, and is evaluated on the complete validation set, each character predicted once, in windows of
64. nanoGPT's checkpoint is its own choice: the one with the lowest loss by its estimate, every 250 steps.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from reproduce import ROOT, SHAKESPEARE_TRAIN, split_text

LENGTH = 64
# as nanoGPT's README gives it
FLAGS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
EVALUATE = f"""
import numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
model.eval()
ids = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
total = 0.0
with torch.no_grad():
    for begin in range(0, len(ids) - 1, {LENGTH}):
        x, y = ids[begin : begin + {LENGTH}][None], ids[begin + 1 : begin + {LENGTH} + 1][None]
        total += float(model(x[:, : y.shape[1]], y)[1]) * y.numel()
print(total / (len(ids) - 1))
"""


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def nanogpt(folder: Path, seed: int) -> tuple[float, float]:
    """Seconds of training, and the loss on the validation set."""
    clone = folder / f"nanoGPT-{seed}"
    run(["git", "clone", "-q", str(folder / "nanoGPT"), str(clone)], folder)
    (clone / "data/shakespeare_char/input.txt").write_bytes((folder / "input.txt").read_bytes())
    run([sys.executable, "prepare.py"], clone / "data/shakespeare_char")
    program = (clone / "train.py").read_text()
    assert "torch.manual_seed(1337 +" in program
    (clone / "train.py").write_text(program.replace("torch.manual_seed(1337 +", f"torch.manual_seed({1337 + seed} +"))
    began = time.perf_counter()
    run([sys.executable, "train.py", "config/train_shakespeare_char.py", *FLAGS.split()], clone)
    took = time.perf_counter() - began
    return took, float(run([sys.executable, "-c", EVALUATE], clone).split()[-1])


def lmtrain(name: str) -> Callable[[Path, int], tuple[float, float]]:
    def train(folder: Path, seed: int) -> tuple[float, float]:
        command = [sys.executable, "-m", "lmtrain", "train", str(ROOT / f"configs/recipes/{name}.yaml")]
        command += ["--trainer.seed", str(seed), "--trainer.id", f"{name}-{seed}"]
        began = time.perf_counter()
        output = run(command, folder)
        return time.perf_counter() - began, float(re.findall(r"eval loss ([\d.]+)", output)[-1])

    return train


PROGRAMS: dict[str, Callable[[Path, int], tuple[float, float]]] = {
    "nanoGPT": nanogpt,
    "shakespeare_char_cpu": lmtrain("shakespeare_char_cpu"),
    "shakespeare_char_modern": lmtrain("shakespeare_char_modern"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nanogpt", type=Path, help="a clone of nanoGPT")
    parser.add_argument("text", type=Path, help="Tiny Shakespeare")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["git", "clone", "-q", str(arguments.nanogpt.absolute()), "nanoGPT"], folder)
        text = arguments.text.read_bytes()
        (folder / "input.txt").write_bytes(text)
        split_text(text, SHAKESPEARE_TRAIN, folder)
        for seed in range(arguments.seeds):
            for program, train in PROGRAMS.items():
                took, loss = train(folder, seed)
                found[program].append((took, loss))
                print(f"seed {seed} {program:<24} {took:6.1f} s  loss {loss:.4f}", flush=True)
    peer = [took for took, _ in found["nanoGPT"]]
    for program, rows in found.items():
        times, losses = zip(*rows, strict=True)
        ratio = median(theirs / own for theirs, own in zip(peer, times, strict=True))
        print(
            f"{program:<24} loss {mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}), {median(times):.0f} s, "
            f"{ratio:.2f} x the speed of nanoGPT"
        )


if __name__ == "__main__":
    main()
