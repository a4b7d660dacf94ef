"""What the state uses of a device's memory; errors and advice for a step that does not fit."""

import pytest

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program import out_of_memory
from lmtrain.train.program.out_of_memory import OutOfMemoryError
from lmtrain.train.program.program import build_program

SIZES = {"hidden_dim": 256, "num_heads": 4, "num_layers": 4, "seq_len": 128}


def program(model=None, vocab=512, **trainer):
    return build_program(RunConfig(model=Gpt2Config(**SIZES | (model or {})), trainer=trainer), vocab)


def use(*arguments, **trainer):
    return program(*arguments, **trainer).memory_use


@pytest.mark.long
def test_the_state_is_what_the_compiler_counts_as_arguments_but_for_the_batch():
    planned = program(train_batch_size=32)
    compiled = planned.compile().memory_analysis()
    batch = 32 * 128 * (4 + 1 + 4)
    assert abs(compiled.argument_size_in_bytes - batch - planned.memory_use.total) < 4096


def test_the_state_depends_on_precision_and_averaging():
    plain = use(train_batch_size=32).state
    assert use(train_batch_size=32, mp="bf16").state["params"] == plain["params"] // 2
    assert use(train_batch_size=32, model_averaging={}).state["average"] == plain["params"]
    half = use(train_batch_size=32, mp="bf16", model_averaging={}).state
    assert half["average"] == plain["params"]  # float32


def test_out_of_memory_errors_list_what_uses_memory_and_what_to_change():
    planned = program({"gradient_checkpointing": False}, train_batch_size=32)
    with pytest.raises(OutOfMemoryError) as caught, planned.explaining_errors():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes\nmuch more")
    first, where, settings, _, *advice = str(caught.value).splitlines()
    assert first == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"
    for name, size in planned.state_bytes.items():
        assert f"{name} {format_bytes(size)}" in where
    assert settings.partition(": ")[2] == (
        "32 sequences of 128 tokens at once on each part of the mesh, 1 microbatch, gradient_checkpointing false, "
        "mp f32, mesh {'replica': 1, 'data': 1, 'model': 1}, parameters split by fsdp_axis embed"
    )
    assert advice[0].strip().startswith("model.gradient_checkpointing: true")
    assert any("trainer.per_device_parallelism: 16 " in line for line in advice)
    with pytest.raises(RuntimeError, match=r"^something else$"), planned.explaining_errors():
        raise RuntimeError("something else")


def test_a_state_that_is_larger_than_the_memory_is_refused_with_advice_on_the_state_first(monkeypatch):
    planned = program(train_batch_size=4)
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: planned.memory_use.total - 1)
    with pytest.raises(UserError, match=r"^out of memory: the training state needs .* which has") as caught:
        planned.memory_use.check_fits()
    advice = str(caught.value).partition("most effective first:\n")[2].splitlines()
    assert advice[0].strip().startswith("trainer.fsdp_axis")
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: None)
    planned.memory_use.check_fits()


def test_advice_omits_settings_that_are_already_in_use():
    text = "\n".join(use(train_batch_size=1).advice(None))
    assert "gradient_checkpointing" not in text
    assert "per_device_parallelism" not in text
    assert "trainer.mp" not in text
    assert "per_device_parallelism: 1 " in "\n".join(use(train_batch_size=2).advice(None))
    assert "trainer.mp" in "\n".join(use(train_batch_size=1, mp="p=f32,c=bf16").advice(None))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.00 TiB")]
)
def test_bytes_are_formatted_in_a_suitable_unit(size, text):
    assert format_bytes(size) == text
