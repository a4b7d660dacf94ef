"""Figures of the shipped configs, compiled for the devices that they name: a table for BUILD-notes.md.

    bash tools/test_compiled.sh             creates the environment .venv-compiled
    .venv-compiled/bin/python tools/bench/compiled.py [CONFIG ...]      all shipped configs, or those named
    .venv-compiled/bin/python tools/bench/compiled.py --all             families x devices x variants

A config names devices in a comment, `# Devices: --device h100 --devices 8; --device v5p-128`. Sizes are per device and
step: GiB for memory, GB for bytes sent; `x min` is relative to the minimum that FSDP has to send.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_DEVICES = re.compile(r"^# Devices: (.*)$", re.MULTILINE)

FOUR = ["--model.num_layers", "4"]
MPT = ["--initialize_from_hf", "false", "--use_hf_model_config", "false", "--model.hidden_dim", "4096"]
FAMILIES = {
    "gpt2": ["gpt2_small", "--trainer.train_batch_size", "256", "--trainer.per_device_parallelism", "-1"],
    "llama2": ["llama2_7b", *FOUR, "--trainer.train_batch_size", "64"],
    "llama3": ["llama3_8b", *FOUR, "--trainer.train_batch_size", "64"],
    "mpt": ["mpt_7b_continued", *MPT, "--model.num_heads", "32", *FOUR, "--trainer.train_batch_size", "64"],
    "backpack": ["backpack_small", "--trainer.train_batch_size", "128", "--trainer.per_device_parallelism", "-1"],
}
DEVICES = {
    "v5e 4x4": ["--device", "v5e", "--topology", "4x4"],
    # one sequence per device
    "v5p 4x4x4": ["--device", "v5p", "--topology", "4x4x4", "--per_device_parallelism", "-1"],
    "h100 x 8": ["--device", "h100", "--devices", "8"],
    "h100 2 x 8": ["--device", "h100", "--devices", "16", "--hosts", "2"],
}
TENSOR = ["--tensor_parallel_axes", "[mlp, heads, kv_heads, vocab]"]
VARIANTS = {
    **{policy: ["--model.gradient_checkpointing", policy]
       for policy in ("dots", "dots_no_batch", "save_attention", "offload", "false")},
    **{kind: ["--optimizer.type", kind] for kind in ("lion", "adafactor", "muon", "sophia-g", "sophia-h")},
    **{f"tensor {size}": ["--model_axis_size", str(size), *TENSOR] for size in (2, 4, 8)},
    "replicas": ["--replica_ici_axis_size", "2"],
    "microbatches": ["--per_device_parallelism", "1"],
    "unrolled": ["--model.scan_layers", "false"],
    "f32": ["--trainer.mp", "f32"],
    "bf16": ["--trainer.mp", "bf16"],
}  # fmt: skip


def shipped(names: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """For each shipped config: name, device and flags of `lmtrain plan`."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        found = _DEVICES.search(path.read_text())
        if names and path.stem not in names:
            continue
        for flags in found[1].split(";") if found else []:
            yield path.stem, flags.strip().removeprefix("--device "), [path.stem, *flags.split()]


def product() -> Iterator[tuple[str, str, list[str]]]:
    """Families on all devices, and variants of one family on two."""
    for family, config in FAMILIES.items():
        for device, flags in DEVICES.items():
            yield family, device, [*config, *flags]
    for variant, changes in VARIANTS.items():
        for device in ("v5e 4x4", "h100 x 8"):
            yield f"llama2 {variant}", device, [*FAMILIES["llama2"], *DEVICES[device], *changes]


def plan(flags: list[str]) -> dict:
    """The JSON of one plan; `{"failure": reason}` if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain", "plan", *flags, "--json", "--step", "train"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
    )
    if not done.stdout.strip():
        return {"failure": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict = json.loads(done.stdout)
    return found


def row(name: str, device: str, found: dict) -> str:
    if found.get("failure") or found.get("wire_bytes") is None:  # a program that does not fit has no figures
        why = found.get("failure") or "does not fit"
        return f"| {name} | {device} | {found.get('attention', '')} | | | | | | {why} |"
    memory, flops, seconds = found["memory"], found["flops"], found["seconds"]
    loops = " ".join(f"{loop['times']:.4g}" for loop in found["loops"])
    least = found["wire_minimum"]
    wire = f"{found['wire_bytes'] / 1e9:,.1f}" + (f" ({found['wire_bytes'] / least:,.2f} x min)" if least else "")
    return (
        f"| {name} | {device} | {found['attention']} | {memory['peak'] / 2**30:.1f} | "
        f"{memory['state'] / 2**30:.1f} | {flops['compiled'] / flops['model']:.2f} | "
        f"{found['hbm_bytes'] / 1e9:,.0f} ({found['hbm_bytes'] / found['hbm_minimum']:.2f} x min) | {wire} | {loops} | "
        f"{seconds['total']:.3g} s, {seconds['limited_by']}, MFU {100 * found['mfu_bound']:.0f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="names of shipped configs")
    parser.add_argument("--all", action="store_true", help="families x devices x variants")
    arguments = parser.parse_args()
    print("| config | devices | attention | peak GiB | state GiB | products / model's | HBM GB | wire GB | loops "
          "| bound |")  # fmt: skip
    print("| --- " * 10 + "|")
    began = time.monotonic()
    failed = 0
    for name, device, flags in product() if arguments.all else shipped(arguments.configs):
        found = plan(flags)
        failed += bool(found.get("failure"))
        print(row(name, device, found), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
