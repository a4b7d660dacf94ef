"""Tiny runs of `lmtrain train` to make faults in, and what they leave, to compare with a run that was left alone."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from conftest import tiny_settings

RUN = "one"
# Metrics of time; all others are the same in every run.
_TIMES = ("throughput/", "checkpoint/", "goodput/", "memory/", "compile/")
_DEADLINE_SECONDS = 300


def full_settings(steps: int) -> dict:
    """All that has a state or writes files: dropout, accumulation, an average, evaluation, exports, frequent saves."""
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


@contextlib.contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    """Where a tool makes its runs: the folder that was given, or one that goes in the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its runs are ended too, as they are by Ctrl-C
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given or Path(temporary)).absolute()
        os.environ.setdefault("LMTRAIN_TEST_COMPILATION_CACHE", str(folder / "compiled"))
        yield folder


def write_config(folder: Path, settings: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(settings))  # JSON is YAML


def start(folder: Path, *flags: object, verb: str = "train", told: str = "told.txt", **environment: str):
    """The process; what it says goes to the file `told`. With its workers it is a group of its own: see `end`."""
    command = [sys.executable, "-m", "lmtrain", verb, "tiny.json", "--trainer.id", RUN, *map(str, flags)]
    with open(folder / told, "w") as file:
        return subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=file, start_new_session=True, env=os.environ | environment
        )


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill what still runs of each, workers too, and wait for it."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running(folder: Path, *flags: object, **keywords: str) -> Iterator[subprocess.Popen]:
    process = start(folder, *flags, **keywords)
    try:
        yield process
    finally:
        end([process])


def finish(folder: Path, *flags: object, **keywords: str) -> str:
    """Let it run to its end. -> what it said"""
    with running(folder, *flags, **keywords) as process:
        code = process.wait(timeout=_DEADLINE_SECONDS)
    told = (folder / keywords.get("told", "told.txt")).read_text()
    assert code == 0, told
    return told


@contextlib.contextmanager
def running_two(folder: Path, *flags: object, attempt: str) -> Iterator[list[subprocess.Popen]]:
    """A run of two processes with a device each; what they say goes to `<attempt>.0.txt` and `<attempt>.1.txt`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    meet = ("--trainer.distributed.coordinator_address", address, "--trainer.distributed.num_processes", 2)
    processes: list[subprocess.Popen] = []
    try:
        for number in range(2):
            place = (*meet, "--trainer.distributed.process_id", number)
            processes.append(start(folder, *place, *flags, told=f"{attempt}.{number}.txt"))
        yield processes
    finally:
        end(processes)


def wait_for(found: Callable[[], object], processes: Sequence[subprocess.Popen]) -> None:
    """Until `found` gives something true. Fails if a process ends before."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not found():
        assert all(process.poll() is None for process in processes), "it ended before what was waited for"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def log_file(folder: Path) -> Path:
    return folder / "logs" / f"{RUN}.metrics.jsonl"


def run_folder(folder: Path) -> Path:
    return folder / "checkpoints" / RUN


def metrics(folder: Path) -> list[dict]:
    """The metrics log, line by line, without anything that depends on the clock."""
    lines = map(json.loads, log_file(folder).read_text().splitlines())
    plain = [{name: value for name, value in line.items() if not name.startswith(_TIMES)} for line in lines]
    return [line for line in plain if line.keys() != {"step"}]


def trained_steps(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder) if "train/loss" in line]


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint has its manifest."""
    manifests = run_folder(folder).glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)


def continued_from(told: str) -> int | None:
    """The step that a start went on from, 0 if it began, None if it was ended before it said."""
    found = re.search(r"resuming after step ([\d,]+)", told)
    if found:
        return int(found[1].replace(",", ""))
    return 0 if "one epoch is" in told else None  # which is said once the state is there


def arrays(folder: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint as bytes, by name: parameters, optimizer, and the average if there is one."""
    tree = {}
    for part in ("params", "optimizer", "average"):
        path = run_folder(folder) / f"step-{step}" / part
        if path.exists():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it reads the shardings from the file, which is what is wanted
                tree[part] = orbax.restore(path.absolute())
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(name): np.asarray(leaf).tobytes() for name, leaf in leaves}


def exports(folder: Path) -> dict[str, bytes]:
    """Every file of every export."""
    root = folder / "exports"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    """What there is in the run's folders, to two levels within that of checkpoints: Orbax names its files by chance."""
    found = [run_folder(folder), *run_folder(folder).glob("*"), *run_folder(folder).glob("*/*")]
    found += [path for top in ("logs", "exports", "cache") for path in (folder / top).rglob("*")]
    return {str(path.relative_to(folder)) for path in found}


def differences(folder: Path, undisturbed: Path, steps: int) -> list[str]:
    """How what a run of so many steps left differs from what an undisturbed one left, in words; empty if in nothing."""
    problems = []
    if trained_steps(folder) != list(range(1, steps + 1)):
        problems.append("steps are missing in the metrics, or there twice or out of order")
    pairs = zip(metrics(folder), metrics(undisturbed), strict=False)
    wrong = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    if wrong or len(metrics(folder)) != len(metrics(undisturbed)):
        problems.append(f"metrics differ, first in line {wrong[0] if wrong else 'the last'}")
    for what, found, expected in (
        ("array", arrays(folder, steps), arrays(undisturbed, steps)),
        ("export", exports(folder), exports(undisturbed)),
    ):
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        problems += [f"{what} {name} differs" for name in different]
    problems += [f"left over: {name}" for name in sorted(names(folder) - names(undisturbed))]
    problems += [f"missing: {name}" for name in sorted(names(undisturbed) - names(folder))]
    return problems
