"""The program of a run, before any arrays exist."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.run.config import RunConfig
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


def test_sequences_that_do_not_split_are_refused():
    with pytest.raises(UserError, match=r"trainer\.model_axis_size: 1 device does not divide by 2"):
        program(trainer={"model_axis_size": 2})
