"""Memory of a step: exact for the state, near the compiler's figure for the rest; advice sorted by effect."""

import jax
import pytest

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.run.config import RunConfig
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program.advice import advice_for, estimate_memory
from lmtrain.train.program.program import OutOfMemoryError, plan_program

SIZES = {"hidden_dim": 256, "num_heads": 4, "num_layers": 4, "seq_len": 128}


def program(model=None, vocab=512, **trainer):
    return plan_program(RunConfig(model=Gpt2Config(**SIZES | (model or {})), trainer=trainer), vocab)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "micro"),
    [(True, 8), (True, -1), (False, -1)],
)
def test_the_estimate_is_near_the_compilers_figure(checkpointing, micro):
    """The ratio of estimate and compiler's figure is between 0.6 and 1.5."""
    planned = program(
        {"gradient_checkpointing": checkpointing}, train_batch_size=32, per_device_parallelism=micro, mp="f32"
    )
    state = sum(estimate_memory(planned).state.values())
    compiled = planned.compile().memory_analysis()
    # the compiler counts the batch among the arguments
    batch = 32 * 128 * (4 + 1 + 4)
    assert abs(compiled.argument_size_in_bytes - batch - state) < 4096
    assert 0.6 < estimate_memory(planned).total / (state + compiled.temp_size_in_bytes) < 1.5


def test_larger_batches_and_other_dtypes_change_the_estimate():
    plain = estimate_memory(program(train_batch_size=32))
    assert estimate_memory(program(train_batch_size=32, mp="bf16")).state["params"] == plain.state["params"] // 2
    assert "copy of the parameters" in estimate_memory(program(train_batch_size=32, mp="p=f32,c=bf16")).work
    assert estimate_memory(program(train_batch_size=64)).work["saved activations"] > plain.work["saved activations"]
    assert estimate_memory(program(train_batch_size=32, model_averaging={})).state["average"] == plain.state["params"]


def test_recomputation_keeps_the_inputs_of_blocks_only():
    kept, recomputed = (
        estimate_memory(program({"gradient_checkpointing": policy}, train_batch_size=32)).work["saved activations"]
        for policy in (False, True)
    )
    inputs = 4 * 32 * 128 * 256 * 4  # of four blocks, in float32
    assert inputs < recomputed < 1.3 * inputs  # and what surrounds the blocks
    assert kept > 8 * inputs


def test_out_of_memory_errors_list_what_uses_memory_and_what_to_change():
    planned = program({"gradient_checkpointing": False}, train_batch_size=32)
    with pytest.raises(OutOfMemoryError) as caught, planned.explaining_errors():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes\nmuch more")
    first, where, biggest, settings, _, *advice = str(caught.value).splitlines()
    assert first == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"
    assert "saved activations" in where
    sizes = jax.tree.map(lambda leaf: leaf.size * leaf.dtype.itemsize, planned.abstract.params)
    largest = max(jax.tree.leaves(sizes))
    assert "arrays" in biggest.partition(":")[0]
    assert f" {format_bytes(largest)}" in biggest.partition(",")[0]
    assert settings.partition(": ")[2] == (
        "32 sequences of 128 tokens at once on each part of the mesh, 1 microbatch, gradient_checkpointing false, "
        "mp f32, mesh {'replica': 1, 'data': 1, 'model': 1}, parameters split by fsdp_axis embed"
    )
    assert advice[0].strip().startswith("model.gradient_checkpointing: true")
    assert any("trainer.per_device_parallelism: 16 " in line for line in advice)
    with pytest.raises(RuntimeError, match=r"^something else$"), planned.explaining_errors():
        raise RuntimeError("something else")


def test_advice_omits_settings_that_are_already_in_use():
    text = "\n".join(advice_for(program(train_batch_size=1)))
    assert "gradient_checkpointing" not in text
    assert "per_device_parallelism" not in text
    assert "trainer.mp" not in text
    assert "per_device_parallelism: 1 " in "\n".join(advice_for(program(train_batch_size=2)))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.00 TiB")]
)
def test_bytes_are_formatted_in_a_suitable_unit(size, text):
    assert format_bytes(size) == text
