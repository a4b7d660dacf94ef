"""Cost against size: nothing may grow faster than its input.

    .venv/bin/python tools/bench/growth.py [WHAT ...]

checkpoints  `lmtrain checkpoint list` of a run with 10 to 3,000 checkpoints
report       `lmtrain report` of a run of 1,000 to 100,000 logged steps
shards       `lmtrain train` to its first step, from a cache of 10 to 10,000 shards, one of each text file
files        `lmtrain preprocess` of 10 to 10,000 text files of one size
devices      the bound of `lmtrain plan` for a step of llama2_7b on 8 to 4,096 TPU v5p, four sequences each; run it
             with the Python of `.venv-compiled`

Prints seconds by size, and the exponent of the growth from each size to the next: 1 is linear, 0 is constant.
Checkpoints are links to the arrays of the first.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from startup import LMTRAIN, seconds, seconds_to_first_step

from lmtrain.checkpoint.manifest import NAME, read_manifest, write_manifest

ONE_STEP = ["train", "gpt2_nano", "--trainer.id", "one", "--trainer.num_train_steps", "1"]


def checkpoints(folder: Path, number: int) -> float:
    seconds(ONE_STEP, str(folder))
    first = folder / "checkpoints/one/step-1"
    manifest = read_manifest(str(first))
    for step in range(1, number + 1):
        own = folder / f"checkpoints/many/step-{step}"
        own.mkdir(parents=True)
        for file in first.iterdir():
            if file.name != NAME:
                (own / file.name).symlink_to(file)
        write_manifest(str(own), dataclasses.replace(manifest, step=step))
    return seconds(["checkpoint", "list", "checkpoints/many"], str(folder))


def report(folder: Path, number: int) -> float:
    seconds(ONE_STEP, str(folder))
    lines = [json.loads(line) for line in (folder / "logs/one.metrics.jsonl").read_text().splitlines()]
    step = max((line for line in lines if line["step"] == 1), key=len)
    with open(folder / "logs/many.metrics.jsonl", "w") as file:
        for n in range(1, number + 1):
            print(json.dumps({**step, "step": n, "train/loss": 9 / math.sqrt(n)}), file=file)
    return seconds(["report", "many"], str(folder))


def texts(folder: Path, number: int) -> str:
    """Write text files and a config of a small model that reads them. -> its path"""
    (folder / "texts").mkdir()
    for n in range(number):
        (folder / f"texts/{n}.txt").write_text(f"text {n} " * 100)
    config = {
        "data": {"tokenizer": "byte", "cache_dir": "cache/many", "text_documents": "file", "train_urls": ["texts/*"]},
        "model": {"type": "gpt2", "hidden_dim": 64, "num_heads": 2, "num_layers": 2, "seq_len": 64},
        "trainer": {"train_batch_size": 8, "steps_per_eval": None},
    }
    (folder / "many.yaml").write_text(json.dumps(config))
    return "many.yaml"


def shards(folder: Path, number: int) -> float:
    config = texts(folder, number)
    seconds(["preprocess", config], str(folder))
    seconds_to_first_step(str(folder), "compiles", config)
    return seconds_to_first_step(str(folder), "many", config)


def files(folder: Path, number: int) -> float:
    return seconds(["preprocess", texts(folder, number)], str(folder))


def devices(folder: Path, number: int) -> float:
    command = [*LMTRAIN, "plan", "llama2_7b", "--device", f"v5p-{2 * number}", "--step", "train", "--json"]
    command += ["--trainer.train_batch_size", str(4 * number)]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found = json.loads(done.stdout)
    sent, least = found["wire_bytes"] / 1e9, found["wire_minimum"] / 1e9
    print(f"{sent:.1f} GB sent ({sent / least:.2f} x the minimum), {found['hbm_bytes'] / 1e9:,.0f} GB of HBM")
    return float(found["seconds"]["total"])


CASES: dict[str, tuple[Callable[[Path, int], float], tuple[int, ...]]] = {
    "checkpoints": (checkpoints, (10, 100, 1000, 3000)),
    "report": (report, (1000, 10_000, 100_000)),
    "shards": (shards, (10, 1000, 10_000)),
    "files": (files, (10, 1000, 10_000)),
    "devices": (devices, (8, 64, 512, 4096)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    for name in parser.parse_args().what or CASES:
        measure, sizes = CASES[name]
        before = None
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                took = measure(Path(folder), size)
                made = time.perf_counter() - began - took
            exponent = f"exponent {math.log(took / before[1], size / before[0]):.2f}" if before else ""
            print(f"{name:<12} {size:>8,} {took:8.2f} s  {exponent}  (made in {made:.0f} s)", flush=True)
            before = size, took


if __name__ == "__main__":
    main()
