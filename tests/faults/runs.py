"""Tiny runs of `lmtrain train` for fault injection, and their results to compare with an undisturbed run."""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from conftest import log_lines, tiny_settings
from forked import Forked, ended

RUN = "one"
# Metrics of time; all others are the same in every run.
_TIMES = ("throughput/", "checkpoint/", "goodput/", "memory/", "compile/")
DEADLINE_SECONDS = 300


def full_settings(steps: int) -> dict:
    """All features with a state or files: dropout, accumulation, EMA, evaluation, exports, frequent saves."""
    settings = tiny_settings()
    settings["model"] |= {"resid_pdrop": 0.1, "embed_pdrop": 0.1}
    settings["trainer"] |= {
        "num_train_steps": steps,
        "per_device_parallelism": 2,
        "steps_per_eval": 50,
        "model_averaging": {"type": "ema", "beta": 0.9},
        "checkpointer": {"save_interval": "1s", "keep": [{"every": 100}]},
    }
    return settings | {"hf_save_path": "exports", "hf_save_steps": 60}


def moe_settings(steps: int) -> dict:
    """The same with a mixture of experts whose load a bias balances; no Hugging Face model has such a router."""
    settings = full_settings(steps)
    moe = {"num_experts": 4, "router": "sigmoid", "shared_experts": 1, "bias_update_rate": 0.01, "dropout": 0.1}
    sizes = {"hidden_dim": 32, "intermediate_dim": 24, "num_heads": 4, "num_layers": 2, "seq_len": 32}
    settings["model"] = {"type": "llama", **sizes, "moe": moe}
    return {name: value for name, value in settings.items() if not name.startswith("hf_save")}


def lora_settings(steps: int, folder: Path) -> dict:
    """The same with LoRA, with dropout, on a base that is trained for two steps and exported in `folder`."""
    write_config(folder, full_settings(2) | {"hf_save_steps": 2})
    finish(folder)
    settings = full_settings(steps) | {"initialize_from_hf": str(folder / "exports" / RUN / "step-2")}
    return settings | {"lora": {"r": 4, "alpha": 16, "dropout": 0.1, "modules_to_save": ["lm_head"]}}


@contextlib.contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    """The folder for the runs of a tool: `given`, or a temporary one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kills its runs too, as Ctrl-C does
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given or Path(temporary)).absolute()
        os.environ.setdefault("LMTRAIN_TEST_COMPILATION_CACHE", str(folder / "compiled"))
        yield folder


def write_config(folder: Path, settings: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(settings))  # JSON is YAML


def start(
    folder: Path,
    *flags: object,
    verb: str = "train",
    run: str = RUN,
    output: str = "output.txt",
    before: str | None = None,
    **environment: str,
) -> Forked:
    """Start a process whose output goes to the file `output`. It leads a process group with its workers: see `end`.

    `before`: Python code to run before lmtrain starts.
    """
    script = f"{before}\nfrom lmtrain.__main__ import main\nmain()\n" if before else None
    return Forked([verb, "tiny.json", "--trainer.id", run, *flags], folder, folder / output, script, **environment)


@contextlib.contextmanager
def running(folder: Path, *flags: object, **keywords: str) -> Iterator[Forked]:
    with ended(start(folder, *flags, **keywords)) as (process,):
        yield process


def finish(folder: Path, *flags: object, code: int = 0, **keywords: str) -> str:
    """Run to the end with this exit code. -> the output"""
    with running(folder, *flags, **keywords) as process:
        return output_of(process, code)


def output_of(process: Forked, code: int) -> str:
    """Wait for a process, which must end with this exit code and without a traceback. -> the output"""
    found, output = process.wait(timeout=DEADLINE_SECONDS), process.output.read_text()
    assert found == code, output
    assert "Traceback" not in output
    return output


def wait_for(found: Callable[[], Any], processes: Sequence[Forked] = ()) -> Any:
    """Wait until `found` returns a true value. Fails if a process ends before. -> the value"""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (result := found()):
        assert all(process.poll() is None for process in processes), "a process ended before the event"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


def log_file(folder: Path, run: str = RUN) -> Path:
    return folder / "logs" / f"{run}.metrics.jsonl"


def run_folder(folder: Path, run: str = RUN) -> Path:
    return folder / "checkpoints" / run


def metrics(folder: Path) -> list[dict]:
    """The lines of the metrics log, without times."""
    plain = [{name: line[name] for name in line if not name.startswith(_TIMES)} for line in log_lines(folder)]
    return [line for line in plain if line.keys() != {"step"}]


def trained_steps(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder) if "train/loss" in line]


def last_logged(folder: Path, run: str = RUN) -> int:
    """The last step with a complete line in the log; 0 before the first."""
    if not log_file(folder, run).exists():
        return 0
    complete = [line for line in log_file(folder, run).read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((json.loads(line)["step"] for line in complete), default=0)


def complete_steps(folder: Path, run: str = RUN) -> list[int]:
    """Steps whose checkpoint has its manifest."""
    manifests = run_folder(folder, run).glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)


def last_saved(folder: Path) -> int:
    return max(complete_steps(folder), default=0)


def resumed_from(output: str) -> int | None:
    """The step from which a process resumed, 0 for a new run, None if the process ended before it logged this."""
    found = re.search(r"resuming after step ([\d,]+)", output)
    if found:
        return int(found[1].replace(",", ""))
    return 0 if "a new run:" in output else None


def arrays(folder: Path, step: int, run: str = RUN) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name, saved from any devices: parameters, optimizer state, and EMA if any."""
    tree = {}
    for part in ("params", "optimizer", "average"):
        path = (run_folder(folder, run) / f"step-{step}" / part).absolute()
        if path.exists():
            handler = ocp.PyTreeCheckpointHandler()
            with ocp.Checkpointer(handler) as orbax, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the devices of the shardings in the file may not exist here
                to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
                tree[part] = orbax.restore(path, restore_args=to_host)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def array_bytes(folder: Path, step: int, run: str = RUN) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays(folder, step, run).items()}


def exports(folder: Path) -> dict[str, bytes]:
    """Every file of every export."""
    root = folder / "exports"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    """All names in the run's folders; of checkpoints two levels, since Orbax chooses random file names below."""
    found = [run_folder(folder), *run_folder(folder).glob("*"), *run_folder(folder).glob("*/*")]
    found += [path for top in ("logs", "exports", "cache") for path in (folder / top).rglob("*")]
    return {str(path.relative_to(folder)) for path in found}


def differences(folder: Path, undisturbed: Path, steps: int) -> list[str]:
    """Differences between a run of `steps` steps and an undisturbed one, one message each; empty if there are none."""
    problems = []
    if trained_steps(folder) != list(range(1, steps + 1)):
        problems.append("steps in the metrics are missing, repeated or out of order")
    pairs = zip(metrics(folder), metrics(undisturbed), strict=False)
    wrong = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    if wrong or len(metrics(folder)) != len(metrics(undisturbed)):
        problems.append(f"metrics differ, first in line {wrong[0] if wrong else 'the last'}")
    for what, found, expected in (
        ("array", array_bytes(folder, steps), array_bytes(undisturbed, steps)),
        ("export", exports(folder), exports(undisturbed)),
    ):
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        problems += [f"{what} {name} differs" for name in different]
    problems += [f"left over: {name}" for name in sorted(names(folder) - names(undisturbed))]
    problems += [f"missing: {name}" for name in sorted(names(undisturbed) - names(folder))]
    return problems
