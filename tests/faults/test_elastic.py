"""A run resumes on other devices, in other precision or with other microbatches, and trains on the same batches.

It is trained on eight fake devices, in a mesh of 4 x 2 with EMA and Adam's moments, and saved after step 4. Resumed on
the same mesh, it is bitwise identical. On any other mesh the losses agree up to the order of sums over devices; with
other batches they would not, since losses differ far more from step to step.
"""

import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import tiny_settings
from forked import Forked, fake_devices

pytestmark = pytest.mark.end_to_end

SAVED, LAST = 4, 12
PARTS = ("params", "optimizer", "average")
SECONDS = 300

EIGHT = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp,heads,vocab]")
ALONE = ("--trainer.model_axis_size", "1")
# name -> number of processes, devices per process, mesh flags
OTHERS = {
    "1 device": (1, 1, ALONE),
    "2 devices": (1, 2, ALONE),
    "4 devices": (1, 4, EIGHT),
    "2 processes": (2, 2, EIGHT),
    "8 devices, data parallel": (1, 8, ALONE),
    "8 devices, replicas": (1, 8, (*EIGHT, "--trainer.replica_ici_axis_size", "2")),
    "8 devices, model axis of 4": (1, 8, ("--trainer.model_axis_size", "4", "--trainer.tensor_parallel_axes", "[mlp]")),
}
NOT_LONG = "1 device"


def config() -> dict:
    settings = tiny_settings()
    settings["model"]["num_heads"] = 4
    settings["trainer"] |= {"train_batch_size": 8, "model_averaging": {"beta": 0.9}}
    return settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the config, the caches, and the undisturbed run `eight` on eight devices."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "tiny.json").write_text(json.dumps(config()))
    train(folder, "eight", 1, 8, EIGHT)
    return folder


def start(folder: Path, run: str, processes: int, devices: int, flags: Sequence[str]) -> list[Forked]:
    """The processes of a run, with output to `<run>.<number>.txt`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    running = []
    for number in range(processes):
        meet = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": processes, "process_id": number}
        place = [f"--trainer.distributed.{name}={value}" for name, value in meet.items() if processes > 1]
        arguments = ["train", "tiny.json", "--trainer.id", run, *place, *flags]
        running.append(Forked(arguments, folder, folder / f"{run}.{number}.txt", XLA_FLAGS=fake_devices(devices)))
    return running


def train(folder: Path, run: str, processes: int, devices: int, flags: Sequence[str], code: int = 0) -> str:
    """The output of the first process. All must exit with `code`."""
    running = start(folder, run, processes, devices, flags)
    try:
        codes = [process.wait(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    output = (folder / f"{run}.0.txt").read_text()
    assert codes == [code] * processes, output
    return output


def resume(
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
    """Start `run` with a copy of one checkpoint of `source`. -> the output"""
    checkpoint = folder / "checkpoints" / source / f"step-{step}"
    shutil.copytree(checkpoint, folder / "checkpoints" / run / f"step-{step}")
    output = train(folder, run, processes, devices, flags, code)
    if code == 0:
        assert f"resuming after step {step}" in output
    return output


def losses(folder: Path, run: str) -> dict[int, float]:
    """The loss of each step."""
    lines = map(json.loads, (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def evaluations(folder: Path, run: str) -> list[tuple[int, float, float]]:
    """Step, and the losses of the parameters and of the EMA."""
    lines = map(json.loads, (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval/loss"], line["eval/ema/loss"]) for line in lines if "eval/loss" in line]


def assert_same_losses(folder: Path, run: str, other: str = "eight", *, after: int = SAVED, rtol: float = 1e-5) -> None:
    """Compare the losses of all steps and evaluations after step `after`."""
    found, expected = losses(folder, run), losses(folder, other)
    assert list(found) == list(range(after + 1, LAST + 1))
    values = [expected[step] for step in found]
    np.testing.assert_allclose(list(found.values()), values, rtol=rtol)
    assert np.abs(np.diff(values)).min() > 10 * rtol * max(values), (
        "consecutive losses are too close to detect other batches"
    )
    evaluated = [line for line in evaluations(folder, other) if line[0] > after]
    np.testing.assert_allclose(evaluations(folder, run), evaluated, rtol=rtol)


def arrays(folder: Path, run: str, step: int = LAST) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, saved from any devices."""
    tree = {}
    for part in PARTS:
        path = folder / "checkpoints" / run / f"step-{step}" / part
        handler = ocp.PyTreeCheckpointHandler()
        with ocp.Checkpointer(handler) as orbax, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the devices of the shardings in the file do not exist here
            to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
            tree[part] = orbax.restore(path, restore_args=to_host)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def test_the_checkpoint_has_sharded_arrays_and_the_loss_falls(folder):
    output = (folder / "eight.0.txt").read_text()
    assert "8 cpu device(s), mesh {'replica': 1, 'data': 4, 'model': 2}" in output
    assert re.search(r"blocks/mlp/up/kernel +\| layers 2, embed 32/data 4, mlp 128/model 2 ", output)
    found = losses(folder, "eight")
    assert found[LAST] < found[1] - 1
    assert {name.split("'")[1] for name in arrays(folder, "eight", SAVED)} == set(PARTS)


def test_on_the_same_mesh_a_resumed_run_is_bitwise_identical(folder):
    resume(folder, "same", 1, 8, EIGHT)
    expected = losses(folder, "eight")
    assert losses(folder, "same") == {step: loss for step, loss in expected.items() if step > SAVED}
    assert evaluations(folder, "same") == evaluations(folder, "eight")
    found = arrays(folder, "same")
    for name, array in arrays(folder, "eight").items():
        assert found.pop(name).tobytes() == array.tobytes(), name
    assert not found


@pytest.mark.parametrize(
    "place", [NOT_LONG, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS if name != NOT_LONG)]
)
def test_on_other_devices_the_batches_and_losses_are_the_same(folder, place):
    processes, devices, mesh = OTHERS[place]
    run = re.sub(r"\W+", "-", place)
    output = resume(folder, run, processes, devices, mesh)
    assert re.search(r"changed since .*: mesh\.\w+: the checkpoint has \d, this run has \d", output)
    assert_same_losses(folder, run)


@pytest.mark.long
def test_a_run_of_one_device_resumes_on_eight(folder):
    train(folder, "alone", 1, 1, ALONE)
    output = resume(folder, "grown", 1, 8, EIGHT, source="alone")
    assert "mesh.data: the checkpoint has 1, this run has 4" in output
    assert_same_losses(folder, "grown", "alone")


@pytest.mark.long
def test_a_run_of_two_processes_resumes_on_one_device(folder):
    resume(folder, "pair", 2, 2, EIGHT)
    resume(folder, "single", 1, 1, ALONE, source="pair", step=8)
    assert_same_losses(folder, "single", after=8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "mesh", "per_device", "per_device_eval", "microbatches"), [(8, EIGHT, 1, 2, 2), (1, ALONE, 2, 8, 4)]
)
def test_with_gradient_accumulation_the_losses_are_the_same(
    folder, devices, mesh, per_device, per_device_eval, microbatches
):
    run = f"accumulating-{devices}"
    flags = ["--trainer.per_device_parallelism", str(per_device)]
    flags += [
        "--trainer.per_device_eval_parallelism",
        str(per_device_eval),
    ]  # so that `max_eval_batches` covers the same data
    output = resume(folder, run, 1, devices, [*mesh, *flags])
    assert f"trainer.per_device_parallelism: the checkpoint has -1, this run has {per_device}" in output
    assert f"microbatches.8: the checkpoint has 1, this run has {microbatches}" in output
    assert_same_losses(folder, run)


@pytest.mark.long
def test_parameters_change_to_bfloat16_and_back_to_float32(folder):
    """Both changes are logged; rounding parameters to 8 bits changes the loss by less than a percent."""
    half = "p=bf16,c=f32"
    output = resume(folder, "half", 1, 8, [*EIGHT, "--trainer.mp", half])
    assert f"changed since {folder}/checkpoints/half/step-4: trainer.mp: the checkpoint has 'f32'" in output
    assert "params=bfloat16, compute=float32" in output
    kernels = {array.dtype.name for name, array in arrays(folder, "half", 8).items() if "kernel" in name}
    assert kernels == {"bfloat16"}
    output = resume(folder, "full", 1, 8, EIGHT, source="half", step=8)
    assert f"trainer.mp: the checkpoint has '{half}', this run has 'f32'" in output
    kernels = {array.dtype.name for name, array in arrays(folder, "full").items() if "kernel" in name}
    assert kernels == {"float32"}
    expected = losses(folder, "eight")
    for run in ("half", "full"):
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
def test_the_checkpoint_of_another_model_or_tokenizer_is_refused_with_the_differences(folder, name, flags, differs):
    checkpoints = folder / "checkpoints" / name
    output = resume(folder, name, 1, 8, [*EIGHT, *flags], code=2)
    assert f"{checkpoints}/step-{SAVED} belongs to another run" in output
    assert "Traceback" not in output
    lines = re.findall(r"^  ([\w.]+): the checkpoint has (.+), this config has (.+)$", output, re.MULTILINE)
    assert {field for field, saved, ours in lines if saved != ours} == differs
    assert os.listdir(checkpoints) == [f"step-{SAVED}"]
