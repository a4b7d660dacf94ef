"""`lmtrain plan --json` for accelerators that are not present, as a user calls it. The session caches answers."""

import functools
import json
import os
import subprocess
import sys
import tempfile

from lmtrain.compiled.hlo import Module, parse_hlo

KEPT = tempfile.mkdtemp(prefix="lmtrain-plans-")
_SECONDS = 900

# Four layers for scanned stacks: a loop's body is compiled once for any number of layers.
FOUR = ("--model.num_layers", "4")
NO_HF = ("--initialize_from_hf", "false", "--use_hf_model_config", "false")
MPT_7B = (*NO_HF, "--model.hidden_dim", "4096", "--model.num_heads", "32", *FOUR)


GPU = ("--device", "h100", "--devices", "8", "--step", "train")
HOSTS = ("--device", "h100", "--devices", "16", "--hosts", "2", "--step", "train")
POD = ("--device", "v5p", "--topology", "4x4x4", "--step", "train")
SMALL_POD = ("--device", "v5e", "--topology", "4x4", "--step", "train")
ONE = ("--device", "h100", "--step", "train")


def family(name: str, sequences: int) -> tuple[str, ...]:
    """A family's config with this number of sequences per step in one microbatch, and gradient checkpointing."""
    batch = ("--trainer.train_batch_size", str(sequences), "--trainer.per_device_parallelism", "-1")
    scanned = ("--model.gradient_checkpointing", "true", "--model.scan_layers", "true", *batch)
    return {
        "llama2": ("llama2_7b", *FOUR, *scanned),
        "llama3": ("llama3_8b", *FOUR, *scanned),
        "mpt": ("mpt_7b_continued", *MPT_7B, *scanned),
        "backpack": ("backpack_small", *FOUR, *scanned),
        "gpt2": ("gpt2_small", *scanned),
    }[name]


def run(*arguments: str, folder: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command without XLA_FLAGS, which the tests set for the CPU."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "lmtrain", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=folder or KEPT,
        env={**clean, "XDG_CACHE_HOME": KEPT, **environment},
    )


@functools.cache
def plan(*arguments: str) -> dict:
    """The figures of the training step, with those of the evaluation step under `eval`."""
    done = run(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["failure"] is None, found["failure"]
    return found


@functools.cache
def modules(*arguments: str) -> Module:
    """The compiled program of the step."""
    path = os.path.join(KEPT, f"{abs(hash(arguments))}.hlo")
    done = run(*arguments, "--json", "--hlo", path)
    assert done.returncode in (0, 1), done.stderr
    with open(path) as file:
        return parse_hlo(file.read())
