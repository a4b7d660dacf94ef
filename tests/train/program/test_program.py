"""The program of a run, before any arrays exist."""

import pytest

from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program

MODEL = {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "seq_len": 16}


def program(vocab=64, trainer=None, **model):
    return build_program(RunConfig(model=MODEL | model, trainer={"train_batch_size": 4} | (trainer or {})), vocab)


def test_a_scanned_program_does_not_grow_with_depth_and_an_unrolled_one_does():
    """The program for 12 blocks is as long as for 3, so compilation takes the same time."""

    def length(depth, scan):
        planned = program(num_layers=depth, scan_layers=scan)
        state, batch = planned.example()
        return len(planned.train_step.lower(state, batch).as_text())

    assert length(12, True) < 1.02 * length(3, True)
    assert length(12, False) > 1.2 * length(3, False)


def test_one_program_is_compiled_for_each_size_of_batch():
    sizes = [{"start": 0, "value": 4}, {"start": 2, "value": 8}, {"start": 4, "value": 4}]
    planned = program(trainer={"train_batch_size": sizes, "per_device_parallelism": 2}, num_layers=1)
    assert dict(planned.batching.num_microbatches) == {4: 2, 8: 4}
    assert planned.rows == 2


@pytest.mark.parametrize(
    ("kind", "q", "message"),
    [
        ("a100", "fp8", "NVIDIA A100 80GB has no faster products in fp8; use q=int8, or remove q"),
        ("v5e", "fp8", "TPU v5e has no faster products in fp8; use q=int8"),
        ("v4", "int8", "TPU v4 has no faster products in int8; remove q"),
    ],
)
def test_devices_without_faster_products_in_a_format_refuse_it(kind, q, message):
    config = RunConfig(model=MODEL, trainer={"mp": f"c=bf16,q={q}"})
    with pytest.raises(UserError, match=message):
        build_program(config, 64, accelerator=ACCELERATORS[kind])


def test_training_refuses_a_format_that_saves_no_time_unless_it_is_allowed(monkeypatch):
    def check(**trainer):
        with monkeypatch.context() as patch:
            planned = program(trainer={"mp": "c=bf16,q=int8", **trainer}, num_layers=1)
            patch.setattr("lmtrain.train.program.program.find_accelerator", lambda kind: ACCELERATORS["v6e"])
            planned.check_products_pay()

    with pytest.raises(UserError, match=r"save hardly any time on TPU v6e .* trainer.allow_slow_products: true"):
        check()
    check(allow_slow_products=True)
    check(mp="c=bf16")


def test_sequences_that_do_not_split_are_refused():
    with pytest.raises(UserError, match=r"trainer\.model_axis_size: 1 device does not divide by 2"):
        program(trainer={"model_axis_size": 2})
