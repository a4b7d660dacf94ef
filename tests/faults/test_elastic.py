"""A run resumes on other devices, in other precision or with other microbatches, and trains on the same batches.

It is trained on eight fake devices, in a mesh of 4 x 2 with EMA and Adam's moments, and saved after step 4. Resumed on
the same mesh, it is bitwise identical. On any other mesh the losses agree up to the order of sums over devices; with
other batches they would not, since losses differ far more from step to step.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import log_lines, logged, run_in_process, tiny_settings
from faults.runs import array_bytes, arrays, output_of, write_config
from forked import ended
from multihost.processes import start_run

pytestmark = pytest.mark.end_to_end

SAVED, LAST = 4, 12

EIGHT = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp,heads,vocab]")
ALONE = ("--trainer.model_axis_size", "1")
# name -> number of processes, devices per process, mesh flags
OTHERS = {
    "1 device": (1, 1, ALONE),
    "4 devices": (1, 4, EIGHT),
    "2 processes": (2, 2, EIGHT),
    "8 devices, data parallel": (1, 8, ALONE),
    "8 devices, replicas": (1, 8, (*EIGHT, "--trainer.replica_ici_axis_size", "2")),
    "4 devices, context axis of 4": (1, 4, (*ALONE, "--trainer.context_axis_size", "4")),
    "2 processes, context axis of 4": (2, 2, (*ALONE, "--trainer.context_axis_size", "4")),
    "8 devices, model axis of 4": (1, 8, ("--trainer.model_axis_size", "4", "--trainer.tensor_parallel_axes", "[mlp]")),
}
NOT_LONG = "1 device"
LONG = ("8 devices, replicas", "4 devices, context axis of 4", "8 devices, model axis of 4")
RELEASE = [name for name in OTHERS if name not in (NOT_LONG, *LONG)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the config, the caches, and the undisturbed run `eight` on eight devices."""
    folder = tmp_path_factory.mktemp("elastic")
    settings = tiny_settings()
    settings["model"]["num_heads"] = 4
    settings["trainer"] |= {"train_batch_size": 8, "model_averaging": {"beta": 0.9}}
    write_config(folder, settings)
    train(folder, "eight", 1, 8, EIGHT)
    return folder


def train(folder: Path, run: str, processes: int, devices: int, flags: Sequence[str]) -> str:
    """The output of the first process."""
    with ended(*start_run(folder, run, processes, *flags, devices=devices)) as running:
        output, *_ = [output_of(process, 0) for process in running]
    return output


def resume(
    folder: Path, run: str, processes: int, devices: int, flags: Sequence[str], source: str = "eight", step: int = SAVED
) -> str:
    """Start `run` with a copy of one checkpoint of `source`. -> the output"""
    checkpoint = folder / "checkpoints" / source / f"step-{step}"
    shutil.copytree(checkpoint, folder / "checkpoints" / run / f"step-{step}")
    output = train(folder, run, processes, devices, flags)
    assert f"resuming after step {step}" in output
    return output


def evaluations(folder: Path, run: str) -> list[tuple[int, float, float]]:
    """Step, and the losses of the parameters and of the EMA."""
    lines = log_lines(folder, run)
    return [(line["step"], line["eval/loss"], line["eval/ema/loss"]) for line in lines if "eval/loss" in line]


def assert_same_losses(folder: Path, run: str, other: str = "eight", *, after: int = SAVED, rtol: float = 1e-5) -> None:
    """Compare the losses of all steps and evaluations after step `after`."""
    found, expected = logged(folder, "train/loss", run), logged(folder, "train/loss", other)
    assert list(found) == list(range(after + 1, LAST + 1))
    values = [expected[step] for step in found]
    np.testing.assert_allclose(list(found.values()), values, rtol=rtol)
    assert np.abs(np.diff(values)).min() > 10 * rtol * max(values), (
        "consecutive losses are too close to detect other batches"
    )
    evaluated = [line for line in evaluations(folder, other) if line[0] > after]
    np.testing.assert_allclose(evaluations(folder, run), evaluated, rtol=rtol)


def test_on_the_same_mesh_a_resumed_run_of_sharded_arrays_is_bitwise_identical(folder):
    output = (folder / "eight.0.txt").read_text()
    assert "8 cpu device(s), mesh {'replica': 1, 'data': 4, 'model': 2}" in output
    assert re.search(r"blocks/mlp/up/kernel +\| layers 2, embed 32/data 4, mlp 128/model 2 ", output)
    expected = logged(folder, "train/loss", "eight")
    assert expected[LAST] < expected[1] - 1
    assert {name.split("'")[1] for name in arrays(folder, SAVED, "eight")} == {"params", "optimizer", "average"}
    resume(folder, "same", 1, 8, EIGHT)
    assert logged(folder, "train/loss", "same") == {step: loss for step, loss in expected.items() if step > SAVED}
    assert evaluations(folder, "same") == evaluations(folder, "eight")
    assert array_bytes(folder, LAST, "same") == array_bytes(folder, LAST, "eight")


@pytest.mark.parametrize(
    "place",
    [
        NOT_LONG,
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
        *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.release]) for name in RELEASE),
    ],
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
def test_a_run_with_split_sequences_resumes_with_other_parts(folder):
    two, four = ((*ALONE, "--trainer.context_axis_size", size) for size in ("2", "4"))
    resume(folder, "quarters", 1, 8, four)
    output = resume(folder, "halves", 1, 8, two, source="quarters", step=8)
    assert "mesh.context: the checkpoint has 4, this run has 2" in output
    assert_same_losses(folder, "halves", after=8)


@pytest.mark.long
def test_a_run_of_two_processes_resumes_on_one_device(folder):
    resume(folder, "pair", 2, 2, EIGHT)
    resume(folder, "single", 1, 1, ALONE, source="pair", step=8)
    assert_same_losses(folder, "single", after=8)


@pytest.mark.long
def test_parameters_change_to_bfloat16_and_back_to_float32(folder):
    """Both changes are logged; rounding parameters to 8 bits changes the loss by less than a percent."""
    half = "p=bf16,c=f32"
    output = resume(folder, "half", 1, 8, [*EIGHT, "--trainer.mp", half])
    assert f"changed since {folder}/checkpoints/half/step-4: trainer.mp: the checkpoint has 'f32'" in output
    assert "params=bfloat16, compute=float32" in output
    kernels = {(name.split("'")[1], a.dtype.name) for name, a in arrays(folder, 8, "half").items() if "kernel" in name}
    assert {("params", "bfloat16"), ("average", "float32")} <= kernels
    assert ("params", "float32") not in kernels
    output = resume(folder, "full", 1, 8, EIGHT, source="half", step=8)
    assert f"trainer.mp: the checkpoint has '{half}', this run has 'f32'" in output
    kernels = {array.dtype.name for name, array in arrays(folder, LAST, "full").items() if "kernel" in name}
    assert kernels == {"float32"}
    expected = logged(folder, "train/loss", "eight")
    for run in ("half", "full"):
        for step, loss in logged(folder, "train/loss", run).items():
            assert loss == pytest.approx(expected[step], rel=0.01), (run, step)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "mesh", "per_device", "per_device_eval", "microbatches"), [(8, EIGHT, 1, 2, 2), (1, ALONE, 2, 8, 4)]
)
def test_with_gradient_accumulation_the_losses_are_the_same(
    folder, devices, mesh, per_device, per_device_eval, microbatches
):
    run = f"accumulating-{devices}"
    flags = ["--trainer.per_device_parallelism", str(per_device)]
    flags += ["--trainer.per_device_eval_parallelism", str(per_device_eval)]  # `max_eval_batches` covers the same data
    output = resume(folder, run, 1, devices, [*mesh, *flags])
    assert f"trainer.per_device_parallelism: the checkpoint has -1, this run has {per_device}" in output
    assert f"microbatches.8: the checkpoint has 1, this run has {microbatches}" in output
    assert_same_losses(folder, run)


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
    shutil.copytree(folder / "checkpoints" / "eight" / f"step-{SAVED}", checkpoints / f"step-{SAVED}")
    output = run_in_process(["train", "tiny.json", "--trainer.id", name, *ALONE, *flags], folder, code=2).stderr
    lines = re.findall(r"^  ([\w.]+): the checkpoint has (.+), this config has (.+)$", output, re.MULTILINE)
    assert {field for field, saved, ours in lines if saved != ours} == differs
    assert os.listdir(checkpoints) == [f"step-{SAVED}"]
