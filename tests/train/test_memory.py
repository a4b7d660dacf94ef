"""The memory of a step: exact for what lies there, near the compiler's figure for the rest; advice in order of gain."""

import os
import subprocess
import sys

import jax
import pytest

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.run_config import RunConfig
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.devices import NAMES, find_device
from lmtrain.train.program import OutOfMemoryError, plan_program

SIZES = {"hidden_dim": 256, "num_heads": 4, "num_layers": 4, "seq_len": 128}


def program(model=None, vocab=512, **trainer):
    return plan_program(RunConfig(model=Gpt2Config(**SIZES | (model or {})), trainer=trainer), vocab)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "micro"),
    [(True, 8), (True, -1), (False, -1)],
)
def test_the_estimate_is_near_the_compilers_figure(checkpointing, micro):
    """The bounds are those of the docstring, and a bit."""
    planned = program(
        {"gradient_checkpointing": checkpointing}, train_batch_size=32, per_device_parallelism=micro, mp="f32"
    )
    state = sum(planned.memory.state.values())
    compiled = planned.compile().memory_analysis()
    # the compiler counts the batch among the arguments
    batch = 32 * 128 * (4 + 1 + 4)
    assert abs(compiled.argument_size_in_bytes - batch - state) < 4096
    assert 0.6 < planned.memory.total / (state + compiled.temp_size_in_bytes) < 1.5


def test_what_takes_more_is_counted_more():
    plain = program(train_batch_size=32).memory
    assert program(train_batch_size=32, mp="bf16").memory.state["params"] == plain.state["params"] // 2
    assert "copy of the parameters" in program(train_batch_size=32, mp="p=f32,c=bf16").memory.work
    assert program(train_batch_size=64).memory.work["saved activations"] > plain.work["saved activations"]
    assert program(train_batch_size=32, model_averaging={}).memory.state["average"] == plain.state["params"]


def test_out_of_memory_says_where_it_went_and_what_helps():
    planned = program({"gradient_checkpointing": False}, train_batch_size=32)
    with pytest.raises(OutOfMemoryError) as caught, planned.explaining_memory():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes\nmuch more")
    first, where, biggest, now, head, *advice = str(caught.value).splitlines()
    assert first == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"
    assert "saved activations" in where
    sizes = jax.tree.map(lambda leaf: leaf.size * leaf.dtype.itemsize, planned.abstract.params)
    largest = max(jax.tree.leaves(sizes))
    assert biggest.startswith("biggest arrays that lie there: ")
    assert f" {format_bytes(largest)}" in biggest.partition(",")[0]
    assert now == (
        "now: 32 sequences of 128 tokens at once on each part of the mesh, 1 microbatch, gradient_checkpointing false, "
        "mp f32, mesh {'replica': 1, 'data': 1, 'model': 1}, parameters split by fsdp_axis embed"
    )
    assert head == "what to change, what helps most first:"
    assert advice[0].strip().startswith("model.gradient_checkpointing: true")
    assert any("trainer.per_device_parallelism: 16 " in line for line in advice)
    with pytest.raises(RuntimeError, match=r"^something else$"), planned.explaining_memory():
        raise RuntimeError("something else")


def test_advice_leaves_out_what_is_done_already():
    text = "\n".join(program(train_batch_size=1).advice())
    assert "gradient_checkpointing" not in text
    assert "per_device_parallelism" not in text
    assert "trainer.mp" not in text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.00 TiB")]
)
def test_bytes_are_written_in_the_unit_that_fits(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 40GB"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v4", "TPU v4"),
        ("v5p", "TPU v5p"),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_jaxs_names_and_by_short_ones(kind, name):
    found = find_device(kind)
    assert (found and found.name) == name
    assert all(find_device(short) for short in NAMES)


def test_plan_prints_the_layout_of_absent_devices_and_whether_it_fits(write_config, settings, tmp_path):
    settings["data"] = {"tokenizer": "passthrough", "vocab_size": 50000, "train_urls": ["x.jsonl"]}
    settings["model"] |= {"hidden_dim": 64, "num_heads": 4, "seq_len": 64}
    settings["trainer"]["train_batch_size"] = 64
    config = write_config(settings)

    def plan(*flags):
        command = [sys.executable, "-m", "lmtrain", "plan", str(config), *flags]
        clean = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=clean)

    done = plan("--devices", "16", "--model_axis_size", "4", "--tensor_parallel_axes", "[mlp, heads]", "--device", "l4")
    assert done.returncode == 0, done.stderr
    assert "16: replica 1 x data 4 x model 4" in done.stdout
    assert "embed 64/data 4, mlp 256/model 4" in done.stdout
    assert "fits: " in done.stdout
    assert "all-gather" in done.stdout
    big = ["--model.hidden_dim", "8192", "--model.num_layers", "48", "--model.num_heads", "64", "--no_compile"]
    done = plan("--devices", "2", "--device", "v5e", *big)
    assert done.returncode == 1, done.stderr
    assert "does not fit: " in done.stdout
    assert "more devices" in done.stdout
    done = plan("--devices", "12", "--model_axis_size", "5")
    assert done.returncode == 2
    assert "trainer.model_axis_size: 12 devices do not divide by 5; it could be 4 or 6" in done.stderr
