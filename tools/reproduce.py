"""Reproduce a recipe of configs/recipes: `bash tools/reproduce.sh NAME` installs lmtrain and calls this."""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "recipes"
TABLE = RECIPES / "recipes.yaml"
RUN = "run"
BLOCK = 1 << 20

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_TRAIN = 1_003_854  # characters, as nanoGPT's prepare.py splits them
FINEWEB = "kjj0/fineweb10B-gpt2"  # FineWeb's sample of 10 G tokens in llm.c's format
FINEWEB_SHARDS = ["fineweb_val_000000.bin", *(f"fineweb_train_{number:06}.bin" for number in range(1, 104))]


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"reproduce: {message}", file=sys.stderr)
    sys.exit(code)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def download(url: str, checksum: str, path: Path) -> None:
    """Download a file, from where an earlier attempt ended. Exits with 2 if it is not the file with this checksum."""
    if path.exists():
        return
    part = path.with_name(path.name + ".part")
    begin = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-"} if begin else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer, open(part, "ab" if begin else "wb") as file:
            if begin and answer.status != 206:  # the server sends the file from its beginning
                file.truncate(0)
            missing = int(answer.headers["Content-Length"])
            while block := answer.read(BLOCK):
                missing -= file.write(block)
        if missing:
            fail(f"{url}: the connection ended early; run the command again to continue from {part}")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send
            fail(f"{url}: HTTP {error.code} {error.reason}")
    except OSError as error:
        where = f" from {part}" if part.exists() else ""
        fail(f"{url}: {getattr(error, 'reason', error)}; run the command again to continue{where}")
    if (found := sha256(part)) != checksum:
        part.unlink()
        fail(f"{url}: the file has the SHA-256 {found}, expected {checksum}; it was deleted, run the command again")
    part.rename(path)


def shakespeare(folder: Path) -> None:
    download(SHAKESPEARE, SHAKESPEARE_SHA256, folder / "input.txt")
    split_text((folder / "input.txt").read_bytes(), SHAKESPEARE_TRAIN, folder)


def split_text(text: bytes, length: int, folder: Path) -> None:
    (folder / "shakespeare").mkdir(exist_ok=True)
    for name, part in (("train", text[:length]), ("validation", text[length:])):
        path = folder / "shakespeare" / f"{name}.txt"
        if not path.exists():  # a new time of an old file would be looked at again
            path.write_bytes(part)


def small_text() -> bytes:
    return (ROOT / "LICENSE").read_bytes()


def small_shakespeare(folder: Path) -> None:
    text = small_text()
    split_text(text, len(text) * 9 // 10, folder)


def fineweb(folder: Path) -> None:
    """20 GB, from the Hugging Face Hub, whose names of large files are their SHA-256."""
    sys.path.insert(0, str(ROOT))
    from lmtrain.hf.hub import explain, offline_reason

    if reason := offline_reason():
        fail(f"{FINEWEB}: {reason}")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    for name in FINEWEB_SHARDS:
        path = folder / "fineweb10B" / name
        if path.exists():
            continue
        try:
            expected = get_hf_file_metadata(hf_hub_url(FINEWEB, name, repo_type="dataset")).etag
            part = Path(hf_hub_download(FINEWEB, name, repo_type="dataset", local_dir=folder / "download"))
        except Exception as error:  # of the Hub's library and of the network
            fail(f"{name}: {explain(error, FINEWEB)}; run the command again to continue")
        if sha256(part) != expected:
            part.unlink()
            fail(f"{part}: the SHA-256 is not {expected}; it was deleted, run the command again")
        path.parent.mkdir(exist_ok=True)
        part.rename(path)


def small_fineweb(folder: Path) -> None:
    """Shards in llm.c's format: 256 numbers, then ids of two bytes."""
    (folder / "fineweb10B").mkdir(exist_ok=True)
    for name in FINEWEB_SHARDS[:2]:
        ids = np.frombuffer(small_text(), np.uint8).astype("<u2")
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids)
        path = folder / "fineweb10B" / name
        if not path.exists():
            path.write_bytes(header.tobytes() + ids.tobytes())


# For each kind of data: what downloads it, and what makes a small one offline.
DATA: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "shakespeare": (shakespeare, small_shakespeare),
    "fineweb10B": (fineweb, small_fineweb),
}


def lmtrain(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    print(f"\n$ lmtrain {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "lmtrain", *arguments], cwd=folder, env=environment)
    if done.returncode:
        fail(f"lmtrain {arguments[0]} ended with {done.returncode}", done.returncode)


def final_loss(folder: Path) -> float:
    """The last loss on the validation set that the run logged."""
    lines = [json.loads(line) for line in (folder / f"logs/{RUN}.metrics.jsonl").read_text().splitlines()]
    return float([line["eval/loss"] for line in lines if "eval/loss" in line][-1])


def seconds(folder: Path) -> float:
    """From the start of training to its end, without the time between two starts."""
    attempts = json.loads((folder / f"logs/{RUN}/goodput.json").read_text())["attempts"]
    return float(sum(attempt["updated"] - attempt["started"] for attempt in attempts))


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    recipes: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())
    parser = argparse.ArgumentParser(
        prog="reproduce", description="Other arguments are settings of lmtrain train.", allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", choices=recipes, help=f"of {', '.join(recipes)}")
    parser.add_argument("--check", action="store_true", help="everything at a small size, offline")
    parser.add_argument("--folder", type=Path, help="default: reproduced/NAME")
    arguments, settings = parser.parse_known_args()
    recipe, name = recipes[arguments.name], arguments.name + ("-check" if arguments.check else "")
    folder = arguments.folder or ROOT / "reproduced" / name
    folder.mkdir(parents=True, exist_ok=True)
    fetch, make_small = DATA[recipe["data"]]
    (make_small if arguments.check else fetch)(folder)
    band = recipe["check"]["band"] if arguments.check else recipe["band"]
    small = recipe["check"]["arguments"] if arguments.check else []

    config = str(RECIPES / f"{arguments.name}.yaml")
    lmtrain(folder, "train", config, "--trainer.id", RUN, *small, *settings)
    lmtrain(folder, "report", RUN)
    loss, took, (low, high) = final_loss(folder), seconds(folder), band
    result = {
        "recipe": name,
        "loss": loss,
        "expected": band,
        "seconds": round(took, 1),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{name}: loss {loss:.4f}, expected {low} to {high}, in {took:.0f} s; {folder / 'result.json'}")
    if not low <= loss <= high:
        fail(f"the loss is outside of the expected band of {TABLE}", 1)


if __name__ == "__main__":
    main()
