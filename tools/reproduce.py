"""Reproduce a recipe of configs/recipes: `bash tools/reproduce.sh NAME` installs lmtrain and calls this."""

import argparse
import datetime
import hashlib
import http.client
import json
import math
import os
import platform
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import yaml

from lmtrain.hf.hub import explain, offline_reason
from lmtrain.runtime.storage import write_bytes, write_json
from lmtrain.tracking.goodput import read_attempts
from lmtrain.tracking.json_log import read_objects

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "recipes"
TABLE = RECIPES / "recipes.yaml"
RUN = "run"
MAX_DEPTH = 200
BLOCK = 1 << 20

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_TRAIN = 1_003_854  # characters, as nanoGPT's prepare.py splits them
HELLASWAG = "https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl"
HELLASWAG_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # as git names it
FINEWEB = "kjj0/fineweb10B-gpt2"  # FineWeb's sample of 10 G tokens in llm.c's format
FINEWEB_SHARDS = ["fineweb_val_000000.bin", *(f"fineweb_train_{number:06}.bin" for number in range(1, 104))]


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"reproduce: {message}", file=sys.stderr)
    sys.exit(code)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_like(expected: str, path: Path) -> str:
    """The SHA-256 of a file, or for 40 digits the name that git has for its content."""
    if len(expected) == 64:
        return sha256(path)
    return hashlib.sha1(b"blob %d\0" % path.stat().st_size + path.read_bytes()).hexdigest()


def download(url: str, checksum: str, path: Path) -> None:
    """Download a file, from where an earlier attempt ended. Exits with 2 if it is not the file with this checksum."""
    if path.exists():
        if (found := checksum_like(checksum, path)) != checksum:
            fail(f"{path}: has the checksum {found}, expected {checksum}; delete it and run the command again")
        return
    part = path.with_name(path.name + ".part")
    begin = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-"} if begin else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer, open(part, "ab" if begin else "wb") as file:
            if begin and answer.status != 206:  # the server sends the file from its beginning
                file.truncate(0)
            missing = int(answer.headers["Content-Length"] or 0)
            while block := answer.read(BLOCK):
                missing -= file.write(block)
        if missing > 0:
            fail(f"{url}: the connection ended early; run the command again to continue from {part}")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send
            fail(f"{url}: HTTP {error.code} {error.reason}")
    except (OSError, http.client.HTTPException) as error:
        where = f" from {part}" if part.exists() else ""
        fail(f"{url}: {getattr(error, 'reason', error)!s}; run the command again to continue{where}")
    if (found := checksum_like(checksum, part)) != checksum:
        part.unlink()
        fail(f"{url}: the file has the checksum {found}, expected {checksum}; it was deleted, run the command again")
    part.rename(path)


def shakespeare(folder: Path) -> None:
    download(SHAKESPEARE, SHAKESPEARE_SHA256, folder / "input.txt")
    split_text((folder / "input.txt").read_bytes(), SHAKESPEARE_TRAIN, folder)


def split_text(text: bytes, length: int, folder: Path) -> None:
    (folder / "shakespeare").mkdir(exist_ok=True)
    write(folder / "shakespeare" / "train.txt", text[:length])
    write(folder / "shakespeare" / "validation.txt", text[length:])


def write(path: Path, content: bytes) -> None:
    """Write a file atomically; one with this content stays as it is, with its time."""
    if not path.exists() or path.read_bytes() != content:
        write_bytes(str(path), content)


def small_text() -> bytes:
    return (ROOT / "LICENSE").read_bytes()


def small_shakespeare(folder: Path) -> None:
    text = small_text()
    split_text(text, len(text) * 9 // 10, folder)


def write_hellaswag(folder: Path, examples: list[dict[str, Any]]) -> None:
    """HellaSwag as a task of `trainer.core`, with llm.c's scores: the ending with the lowest loss per token."""
    items = [{"query": each["ctx"], "choices": each["endings"], "gold": each["label"]} for each in examples]
    task = {"label": "hellaswag", "icl_task_type": "completion", "dataset_uri": "hellaswag.jsonl"}
    (folder / "hellaswag" / "eval_data").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(item) + "\n" for item in items)
    write(folder / "hellaswag" / "eval_data" / "hellaswag.jsonl", lines.encode())
    write(folder / "hellaswag" / "eval_meta_data.csv", b"Eval Task,Random baseline\nhellaswag,25\n")
    write(folder / "hellaswag" / "core.yaml", yaml.safe_dump({"icl_tasks": [task | {"num_fewshot": [0]}]}).encode())


def hellaswag(folder: Path) -> None:
    path = folder / "hellaswag_val.jsonl"
    download(HELLASWAG, HELLASWAG_BLOB, path)
    write_hellaswag(folder, [json.loads(line) for line in path.read_text().split("\n") if line])


def small_hellaswag(folder: Path) -> None:
    lines = [line.strip() for line in small_text().decode().splitlines() if len(line) > 60]
    examples = [
        {"ctx": lines[n][:30], "endings": [lines[(n + m) % len(lines)][30:] for m in range(4)], "label": 0}
        for n in range(20)
    ]
    write_hellaswag(folder, examples)


def fineweb(folder: Path) -> None:
    """20 GB, from the Hugging Face Hub, whose names of large files are their SHA-256."""
    if reason := offline_reason():
        fail(f"{FINEWEB}: {reason}")
    hellaswag(folder)
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
    small_hellaswag(folder)
    (folder / "fineweb10B").mkdir(exist_ok=True)
    for name in FINEWEB_SHARDS[:2]:
        write(folder / "fineweb10B" / name, in_llm_c_format(np.frombuffer(small_text(), np.uint8)))


def in_llm_c_format(ids: np.ndarray) -> bytes:
    """A shard as llm.c reads it: a header of 256 numbers, then ids of two bytes."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    return header.tobytes() + ids.astype("<u2").tobytes()


# For each kind of data: what downloads it, and what makes a small one offline.
DATA: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "shakespeare": (shakespeare, small_shakespeare),
    "fineweb10B": (fineweb, small_fineweb),
}


# Sent to lmtrain, which saves and ends with 75; from a terminal they would reach it twice, and end it at once.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def lmtrain(folder: Path, *arguments: str) -> None:
    """Run a command; exits with its 2 or 75, or with 3 if it fails in another way."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    print(f"\n$ lmtrain {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "lmtrain", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    before = [(number, signal.signal(number, lambda n, _: process.send_signal(n))) for number in FORWARDED]
    code = process.wait()
    for number, handler in before:
        signal.signal(number, handler)
    if code == 75:
        fail("stopped; run the same command again to resume", code)
    if code:
        other = (
            "; if the folder has a run of other settings, choose another --folder" if arguments[0] == "train" else ""
        )
        fail(f"lmtrain {arguments[0]} ended with {code}{other}", 2 if code == 2 else 3)


def final_metrics(folder: Path) -> dict[str, float]:
    """The last value of each metric of the evaluations."""
    found: dict[str, float] = {}
    for line in read_objects(str(folder / f"logs/{RUN}.metrics.jsonl")):
        found |= {name: value for name, value in line.items() if name.startswith("eval/")}
    return found


def commit() -> str:
    """The commit of this clone, with `+` if files were changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def settings_of_depth(config: str, depth: int, law: dict[str, Any], given: list[str]) -> tuple[dict[str, Any], str]:
    """What changes in a recipe with another number of layers: one dial, as nanochat has it; and a line about it.

    The width is proportional to the depth, rounded up to complete heads; tokens are proportional to the parameters that
    multiply them. The batch grows with the tokens, to a power of two, and rates with the batch, by the exponents of
    `law`. With the weight decay, 1 / (rate * decay), the number of steps over which it averages, stays the same part of
    the run (Wang and Aitchison 2024). Initial values fall with the root of the width.
    """
    from lmtrain.config.load import load_config
    from lmtrain.run.config import RunConfig
    from lmtrain.scaling.ladder import multiplying_parameters

    pairs = [flag.removeprefix("--").split("=", 1) for flag in given]
    before = load_config(RunConfig, config, [(name, value) for name, value in pairs]).config
    model, optimizer, trainer = before.model, before.optimizer, before.trainer
    head = model.hidden_dim // model.num_heads
    heads = -(-model.hidden_dim * depth // (model.num_layers * head))
    wider = heads * head / model.hidden_dim
    sizes = {
        "num_layers": depth,
        "hidden_dim": heads * head,
        "num_heads": heads,
        "intermediate_dim": round(model.mlp_dim * wider),
        "initializer_range": float(f"{model.initializer_range * wider**-0.5:.6g}"),
    }
    now, then = (multiplying_parameters(each, law["vocab_size"]) for each in (model.model_copy(update=sizes), model))
    more = now / then
    batch = trainer.batch_sizes.all[0]
    larger = 2 ** round(math.log2(batch * more ** law["batch"])) / batch
    rate = larger ** law["rate"]
    factors = {
        "learning_rate": rate,
        "adam_lr": rate,
        "weight_decay": larger / rate / more,
        "epsilon": 1 / larger,
        "muon_epsilon": 1 / larger,
    }

    def scaled(section: Any) -> dict[str, Any]:
        values = {name: getattr(section, name, None) for name in factors}
        return {name: float(f"{v * factors[name]:.6g}") for name, v in values.items() if v is not None}

    groups = [group.model_dump(exclude_none=True) | scaled(group) for group in optimizer.groups]
    steps = round(trainer.num_train_steps * more / larger)
    at_once = trainer.per_device_parallelism
    if at_once > 0:  # as many activations as in the recipe
        deeper = depth / model.num_layers
        at_once = max(1, 2 ** math.floor(math.log2(at_once * min(larger, 1 / (wider * deeper)))))
    summary = (
        f"depth {depth}: {now:,} parameters that multiply, {heads * head} wide, {steps:,} steps of {batch * larger:.0f}"
    )
    settings = {
        **{f"model.{name}": value for name, value in sizes.items()},
        "trainer.train_batch_size": round(batch * larger),
        "trainer.num_train_steps": steps,
        "trainer.per_device_parallelism": at_once,
        **{f"optimizer.{name}": value for name, value in scaled(optimizer).items()},
        "optimizer.groups": groups,
    }
    return settings, summary


def with_depth(config: str, depth: int, law: dict[str, Any] | None, check: list[str], given: list[str]) -> list[str]:
    """The arguments of `lmtrain train` with --depth: those of --check as they follow from it, and the given ones."""
    if law is None:
        fail(f"--depth: {Path(config).stem} has one size")
    own, summary = settings_of_depth(config, depth, law, check)
    names = [flag.removeprefix("--").split("=")[0] for flag in given if flag.startswith("--")]
    if taken := [
        each for each in names if any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for name in own)
    ]:
        fail(f"--{taken[0]}: --depth sets it" + ("" if taken[0] in own else ", or a part of it"))
    print(summary)
    kept = [flag for flag in check if flag.removeprefix("--").split("=")[0] not in own]
    return [*kept, *(f"--{name}={json.dumps(value)}" for name, value in own.items()), *given]


def main() -> None:
    recipes: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())
    parser = argparse.ArgumentParser(
        prog="reproduce", description="Other arguments are settings of lmtrain train.", allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", choices=recipes, help=f"of {', '.join(recipes)}")
    parser.add_argument("--check", action="store_true", help="everything at a small size, offline")
    parser.add_argument("--depth", type=int, metavar="D", help="number of layers, from which all other sizes follow")
    parser.add_argument(
        "--folder", help="default: reproduced/NAME, with _depth_D; --check works in its subfolder check"
    )
    arguments, settings = parser.parse_known_args()
    recipe, config = recipes[arguments.name], str(RECIPES / f"{arguments.name}.yaml")
    if arguments.folder == "":
        fail("--folder: expected a folder")
    if any(setting.startswith("--trainer.id") for setting in settings):
        fail("--trainer.id: the run of a recipe has its own id; choose another --folder")
    own = arguments.name if arguments.depth is None else f"{arguments.name}_depth_{arguments.depth}"
    folder = Path(arguments.folder or ROOT / "reproduced" / own).absolute()
    folder = folder / "check" if arguments.check else folder
    fetch, make_small = DATA[recipe["data"]]
    band = recipe["check"]["band"] if arguments.check else recipe["band"]
    # the id last, since the report and the loss are those of this run
    flags = [*(recipe["check"]["arguments"] if arguments.check else []), *settings]
    if arguments.depth is not None:
        if not 1 <= arguments.depth <= MAX_DEPTH:
            fail(f"--depth {arguments.depth}: expected 1 to {MAX_DEPTH}")
        check = recipe["check"]["arguments"] if arguments.check else []
        flags, band = with_depth(config, arguments.depth, recipe.get("depth"), check, settings), None
    flags += ["--trainer.id", RUN]
    lmtrain(ROOT, "config", "check", config, *flags)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (make_small if arguments.check else fetch)(folder)
    except OSError as error:
        fail(f"--folder {folder}: {error.strerror or error}")
    lmtrain(folder, "train", config, *flags)
    lmtrain(folder, "report", RUN)

    attempts = read_attempts(str(folder / f"logs/{RUN}/goodput.json"))
    # without the time between two starts
    took = sum(attempt.updated - attempt.started for attempt in attempts)
    metrics = final_metrics(folder)
    loss = metrics["eval/loss"]
    result = {
        "recipe": arguments.name,
        "check": arguments.check,
        "settings": settings,
        "depth": arguments.depth,
        "loss": loss,
        "expected": band,
        "evaluation": metrics,
        "seconds": round(took, 1),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": attempts[-1].facts["devices"],
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    write_json(str(folder / "result.json"), result)
    name = arguments.name + (" at the size of --check" if arguments.check else "")
    expected = "no expected one for this depth" if band is None else f"expected {band[0]} to {band[1]}"
    print(f"\n{name}: loss {loss:.4f}, {expected}, in {took:.0f} s; {folder / 'result.json'}")
    if band is not None and not band[0] <= loss <= band[1]:
        fail(f"the loss is outside of the expected band of {TABLE}", 1)


if __name__ == "__main__":
    main()
