"""The best learning rates of models of two widths, and of two depths, with `transfer` and without.

    .venv/bin/python tools/bench/rates.py FOLDER [--steps 300]

Trains runs of `ladders/nano_large` with other sizes in FOLDER, with the smaller model of each pair as the base, and
prints the loss after the last step by learning rate, and the log2 of the best rate. Started again, it trains those
that are missing. 25 runs, about half an hour on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

# width, layers
PAIRS = {"width": ((64, 2), (256, 2)), "depth": ((64, 2), (64, 8))}
RATES = (-9, -8, -7, -6, -5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    for base, large in PAIRS.values():
        for size, transfer in ((base, None), (large, None), (large, base)):
            name = f"{size[0]}x{size[1]}, {'transfer' if transfer else 'standard'}"
            if name in found:
                continue
            found[name] = {f"2^{n}": loss_of(folder, size, transfer, n, arguments.steps) for n in RATES}
            best = min(found[name], key=lambda rate: found[name][rate])
            losses = "  ".join(f"{rate} {loss:.4f}" for rate, loss in found[name].items())
            print(f"{name:<18} best {best:<5} {losses}", flush=True)
    (folder / "losses.json").write_text(json.dumps(found))


def sizes_of(size: tuple[int, int]) -> dict[str, int]:
    """The model of a width and a depth, with heads of 16."""
    width, layers = size
    return {"hidden_dim": width, "intermediate_dim": 11 * width // 4, "num_heads": width // 16, "num_layers": layers}


def loss_of(folder: Path, size: tuple[int, int], base: tuple[int, int] | None, exponent: int, steps: int) -> float:
    """Train one run, unless its log has it already. -> its evaluation loss after the last step"""
    name = f"{size[0]}x{size[1]}-{'standard' if base is None else 'transfer'}-rate{exponent}-{steps}"
    settings = {
        **{f"model.{key}": value for key, value in sizes_of(size).items()},
        "optimizer.learning_rate": 2.0**exponent,
        "trainer.num_train_steps": steps,
        "trainer.id": name,
        "transfer": "null" if base is None else json.dumps({"base": sizes_of(base)}),
    }
    log = folder / "logs" / f"{name}.metrics.jsonl"
    for _ in range(2):
        lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
        for line in lines:
            if line.get("step") == steps and "eval/loss" in line:
                return float(line["eval/loss"])
        command = [sys.executable, "-m", "lmtrain", "train", "ladders/nano_large"]
        command += [f"--{key}={value}" for key, value in settings.items()]
        with open(folder / f"{name}.txt", "w") as output:
            subprocess.run(command, cwd=folder, stdout=output, stderr=output, check=True)
    sys.exit(f"{name} has no loss of step {steps} in {log}")


if __name__ == "__main__":
    main()
