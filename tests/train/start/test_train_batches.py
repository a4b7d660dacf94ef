"""The training batches of a run, from any step on."""

import re

import pytest
from opened_run import open_run

from lmtrain.runtime.errors import UserError
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.start.train_batches import TrainBatches


def batches(opened):
    return TrainBatches(opened.config, opened.caches, build_layout(opened.config.trainer))


def test_batches_have_the_sizes_of_the_config_and_are_the_same_from_any_step_on():
    found = batches(open_run())
    first, *_, fourth = (batch for batch, _ in zip(found.after(0), range(4), strict=False))
    assert first["tokens"].shape == first["loss_mask"].shape == (4, 32)
    assert (next(found.after(3))["tokens"] == fourth["tokens"]).all()


def test_less_data_than_one_sequence_is_refused():
    with pytest.raises(UserError, match=re.escape("tokens are less than one sequence of 1,000,000")):
        batches(open_run(model={"seq_len": 1_000_000}))
