"""Loss of training with products in 8 bits and in 16 bits: a Llama of 10.8 M parameters on bytes of Python code.

    .venv/bin/python tools/bench/eight_bit.py FOLDER [--seeds 3] [--steps 250] [--formats bf16 fp8 int8]

Trains each format with each seed in FOLDER, one after the other, about four minutes each on two cores; a run that is
complete is not repeated. The text is the standard library, and tokens are bytes: with a larger vocabulary, so short a
run is more sensitive to rounding. Losses of one seed still differ by about 1 %. Prints the evaluation loss of all seeds
by step, and the final one relative to bf16. Exits with 1 if the mean of a format's final losses is more than 0.5 %
above that of bf16.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo_corpus.py"
CONFIG = Path(__file__).parents[2] / "configs" / "llama_nano.yaml"
SIZES = {"hidden_dim": 384, "intermediate_dim": 1024, "num_heads": 6, "num_kv_heads": 6, "num_layers": 6}
BYTES = Path("demo") / "bytes"
FORMATS = {"bf16": "", "fp8": ",q=fp8", "int8": ",q=int8"}
_RATE = 1e-3
_EVERY = 50
_MOST = 1.005
_LOSS = re.compile(r"^step (\d+): eval loss ([\d.]+)", re.MULTILINE)


def train(folder: Path, name: str, seed: int, steps: int) -> dict[int, float]:
    """The evaluation losses of a run by step."""
    log = folder / f"{name}-{seed}-{steps}.txt"
    if not log.exists():
        settings = {
            **{f"model.{key}": value for key, value in SIZES.items()},
            "trainer.mp": f"p=f32,c=bfloat16{FORMATS[name]}",
            "trainer.seed": seed,
            "trainer.id": f"{name}-{seed}-{steps}",
            "trainer.num_train_steps": steps,
            "trainer.train_batch_size": 8,
            "trainer.steps_per_eval": _EVERY,
            "data.tokenizer": BYTES,
            "data.cache_dir": "cache/bytes",
            "optimizer.learning_rate": _RATE,
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "lmtrain", "train", str(CONFIG), *flags]
        log.write_text(run(command, folder))
    return {int(step): float(loss) for step, loss in _LOSS.findall(log.read_text())}


def run(command: list[str], folder: Path) -> str:
    """The output of a command; ends with it if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs; created if it does not exist")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=250, help="number of steps")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="formats to train")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not (arguments.folder / BYTES).exists():
        run([sys.executable, str(DEMO), "demo"], arguments.folder)
        files = "demo/train.{1..8}-of-8.jsonl.gz"
        learn = ["tokenizer", "train", files, "--vocab_size", "257", "--output", str(BYTES)]
        run([sys.executable, "-m", "lmtrain", *learn], arguments.folder)
    curves = {
        (name, seed): train(arguments.folder, name, seed, arguments.steps)
        for seed in range(arguments.seeds)
        for name in dict.fromkeys(["bf16", *arguments.formats])
    }
    last = max(step for curve in curves.values() for step in curve)
    final: dict[str, list[float]] = {}
    print("| step | " + " | ".join(f"{name}, seed {seed}" for name, seed in curves) + " |")
    print("| --- " * (1 + len(curves)) + "|")
    for step in sorted(set().union(*curves.values())):
        print(f"| {step} | " + " | ".join(f"{curve[step]:.4f}" for curve in curves.values()) + " |")
    for (name, _), curve in curves.items():
        final.setdefault(name, []).append(curve[last])
    means = {name: statistics.mean(losses) for name, losses in final.items()}
    for name, losses in final.items():
        each = ", ".join(
            f"{100 * (loss / other - 1):+.2f} %" for loss, other in zip(losses, final["bf16"], strict=True)
        )
        print(f"{name}: mean {means[name]:.4f}, {100 * (means[name] / means['bf16'] - 1):+.2f} % of bf16 ({each})")
    sys.exit(1 if any(mean > _MOST * means["bf16"] for mean in means.values()) else 0)


if __name__ == "__main__":
    main()
