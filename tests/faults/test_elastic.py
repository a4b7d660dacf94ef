"""A run goes on from its checkpoint on other devices, in other precision, in other parts: with the same batches.

It is trained on eight fake devices, in a mesh of 4 x 2 with an average of the parameters and Adam's moments, and saved
after step 4. From there on the same mesh it ends with the same bits. On any other it has the same losses but for the
order in which devices sum, which they could not have on other batches: from step to step losses differ far more.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import tiny_settings

pytestmark = pytest.mark.end_to_end

SAVED, LAST = 4, 12
PARTS = ("params", "optimizer", "average")
SECONDS = 300

EIGHT = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp,heads,vocab]")
ALONE = ("--trainer.model_axis_size", "1")
# name -> how many processes, of how many devices each, and the mesh
OTHERS = {
    "1 device": (1, 1, ALONE),
    "2 devices": (1, 2, ALONE),
    "4 devices": (1, 4, EIGHT),
    "2 processes": (2, 2, EIGHT),
    "8 devices, data alone": (1, 8, ALONE),
    "8 devices, replicas": (1, 8, (*EIGHT, "--trainer.replica_ici_axis_size", "2")),
    "8 devices, model of 4": (1, 8, ("--trainer.model_axis_size", "4", "--trainer.tensor_parallel_axes", "[mlp]")),
}
IN_SHORT = "1 device"


def config() -> dict:
    settings = tiny_settings()
    settings["model"]["num_heads"] = 4
    settings["trainer"] |= {"train_batch_size": 8, "model_averaging": {"beta": 0.9}}
    return settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the config, the caches, and the undisturbed run `eight` on eight devices."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "tiny.json").write_text(json.dumps(config()))
    train(folder, "eight", 1, 8, EIGHT)
    return folder


def start(folder: Path, run: str, processes: int, devices: int, flags: Sequence[str]) -> list[subprocess.Popen]:
    """The processes of a run, which meet if there are several; what they say goes to `<run>.<number>.txt`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    flags_of_xla = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    running = []
    for number in range(processes):
        meet = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": processes, "process_id": number}
        place = [f"--trainer.distributed.{name}={value}" for name, value in meet.items() if processes > 1]
        command = [sys.executable, "-m", "lmtrain", "train", "tiny.json", "--trainer.id", run, *place, *flags]
        with open(folder / f"{run}.{number}.txt", "w") as told:
            environment = os.environ | {"XLA_FLAGS": flags_of_xla}
            running.append(subprocess.Popen(command, cwd=folder, stdout=told, stderr=told, env=environment))
    return running


def train(folder: Path, run: str, processes: int, devices: int, flags: Sequence[str], code: int = 0) -> str:
    """What the first process said; all have to end with `code`."""
    running = start(folder, run, processes, devices, flags)
    try:
        codes = [process.wait(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    told = (folder / f"{run}.0.txt").read_text()
    assert codes == [code] * processes, told
    return told


def go_on(
    folder: Path,
    run: str,
    processes: int,
    devices: int,
    flags: Sequence[str],
    *,
    source: str = "eight",
    step: int = SAVED,
    code: int = 0,
) -> str:
    """`run` begins with a copy of one checkpoint of `source`. -> what it said"""
    checkpoint = folder / "checkpoints" / source / f"step-{step}"
    shutil.copytree(checkpoint, folder / "checkpoints" / run / f"step-{step}")
    told = train(folder, run, processes, devices, flags, code)
    if code == 0:
        assert f"resuming after step {step}" in told
    return told


def losses(folder: Path, run: str) -> dict[int, float]:
    """By step."""
    lines = map(json.loads, (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def evaluations(folder: Path, run: str) -> list[tuple[int, float, float]]:
    """Step, and the losses of the parameters and of their average."""
    lines = map(json.loads, (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval/loss"], line["eval/ema/loss"]) for line in lines if "eval/loss" in line]


def assert_same_losses(folder: Path, run: str, other: str = "eight", *, after: int = SAVED, rtol: float = 1e-5) -> None:
    """Those of every step after `after`, and all evaluations."""
    found, expected = losses(folder, run), losses(folder, other)
    assert list(found) == list(range(after + 1, LAST + 1))
    values = [expected[step] for step in found]
    np.testing.assert_allclose(list(found.values()), values, rtol=rtol)
    assert np.abs(np.diff(values)).min() > 10 * rtol * max(values), "other batches could have given these losses"
    evaluated = [line for line in evaluations(folder, other) if line[0] > after]
    np.testing.assert_allclose(evaluations(folder, run), evaluated, rtol=rtol)


def arrays(folder: Path, run: str, step: int = LAST) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, whichever devices they were saved from."""
    tree = {}
    for part in PARTS:
        path = folder / "checkpoints" / run / f"step-{step}" / part
        handler = ocp.PyTreeCheckpointHandler()
        with ocp.Checkpointer(handler) as orbax, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the devices of the shardings in the file are not here
            to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
            tree[part] = orbax.restore(path, restore_args=to_host)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def test_the_checkpoint_is_of_split_arrays_and_the_run_learns(folder):
    told = (folder / "eight.0.txt").read_text()
    assert "8 cpu device(s), mesh {'replica': 1, 'data': 4, 'model': 2}" in told
    assert re.search(r"blocks/mlp/up/kernel +\| layers 2, embed 32/data 4, mlp 128/model 2 ", told)
    found = losses(folder, "eight")
    assert found[LAST] < found[1] - 1
    assert {name.split("'")[1] for name in arrays(folder, "eight", SAVED)} == set(PARTS)


def test_on_the_same_mesh_every_bit_is_that_of_the_undisturbed_run(folder):
    go_on(folder, "same", 1, 8, EIGHT)
    expected = losses(folder, "eight")
    assert losses(folder, "same") == {step: loss for step, loss in expected.items() if step > SAVED}
    assert evaluations(folder, "same") == evaluations(folder, "eight")
    found = arrays(folder, "same")
    for name, array in arrays(folder, "eight").items():
        assert found.pop(name).tobytes() == array.tobytes(), name
    assert not found


@pytest.mark.parametrize(
    "place", [IN_SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS if name != IN_SHORT)]
)
def test_on_other_devices_the_batches_and_losses_are_the_same(folder, place):
    processes, devices, mesh = OTHERS[place]
    run = re.sub(r"\W+", "-", place)
    told = go_on(folder, run, processes, devices, mesh)
    assert re.search(r"changed since .*: mesh\.\w+: the checkpoint has \d, this run has \d", told)
    assert_same_losses(folder, run)


@pytest.mark.long
def test_from_one_device_to_eight(folder):
    train(folder, "alone", 1, 1, ALONE)
    told = go_on(folder, "grown", 1, 8, EIGHT, source="alone")
    assert "mesh.data: the checkpoint has 1, this run has 4" in told
    assert_same_losses(folder, "grown", "alone")


@pytest.mark.long
def test_what_two_processes_saved_one_device_goes_on_from(folder):
    go_on(folder, "pair", 2, 2, EIGHT)
    go_on(folder, "single", 1, 1, ALONE, source="pair", step=8)
    assert_same_losses(folder, "single", after=8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "mesh", "at_once", "evaluated", "parts"), [(8, EIGHT, 1, 2, 2), (1, ALONE, 2, 8, 4)]
)
def test_with_accumulation_the_losses_are_the_same(folder, devices, mesh, at_once, evaluated, parts):
    run = f"accumulating-{devices}"
    flags = ["--trainer.per_device_parallelism", str(at_once)]
    flags += ["--trainer.per_device_eval_parallelism", str(evaluated)]  # else `max_eval_batches` would be of fewer
    told = go_on(folder, run, 1, devices, [*mesh, *flags])
    assert f"trainer.per_device_parallelism: the checkpoint has -1, this run has {at_once}" in told
    assert f"microbatches.8: the checkpoint has 1, this run has {parts}" in told
    assert_same_losses(folder, run)


@pytest.mark.long
def test_parameters_become_bfloat16_and_float32_again(folder):
    """With a notice both times; rounding a parameter to 8 bits moves the loss by less than a percent."""
    half = "p=bf16,c=f32"
    told = go_on(folder, "half", 1, 8, [*EIGHT, "--trainer.mp", half])
    assert f"changed since {folder}/checkpoints/half/step-4: trainer.mp: the checkpoint has 'f32'" in told
    assert "params=bfloat16, compute=float32" in told
    kernels = {array.dtype.name for name, array in arrays(folder, "half", 8).items() if "kernel" in name}
    assert kernels == {"bfloat16"}
    told = go_on(folder, "whole", 1, 8, EIGHT, source="half", step=8)
    assert f"trainer.mp: the checkpoint has '{half}', this run has 'f32'" in told
    kernels = {array.dtype.name for name, array in arrays(folder, "whole").items() if "kernel" in name}
    assert kernels == {"float32"}
    expected = losses(folder, "eight")
    for run in ("half", "whole"):
        for step, loss in losses(folder, run).items():
            assert loss == pytest.approx(expected[step], rel=0.01), (run, step)


@pytest.mark.parametrize(
    ("name", "flags", "differs"),
    [
        ("model", ["--model.num_layers", "3"], {"model.num_layers"}),
        (
            "tokenizer",
            ["--data.tokenizer", "byte", "--data.cache_dir", "bytes"],
            {"data.tokenizer", "tokenizer.fingerprint", "tokenizer.vocab_size", "data_tokens"},
        ),
    ],
)
def test_the_checkpoint_of_another_model_or_tokenizer_is_refused_with_what_differs(folder, name, flags, differs):
    checkpoints = folder / "checkpoints" / name
    told = go_on(folder, name, 1, 8, [*EIGHT, *flags], code=2)
    assert f"{checkpoints}/step-{SAVED} belongs to another run" in told
    assert "Traceback" not in told
    lines = re.findall(r"^  ([\w.]+): the checkpoint has (.+), this config has (.+)$", told, re.MULTILINE)
    assert {field for field, saved, ours in lines if saved != ours} == differs
    assert os.listdir(checkpoints) == [f"step-{SAVED}"]
