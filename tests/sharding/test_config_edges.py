"""Additions to tests/sharding/test_config.py."""

import pytest
from pydantic import ValidationError

from lmtrain.sharding.axes import PARAMETER_AXES
from lmtrain.sharding.config import PartitioningConfig


def test_only_the_width_of_parameters_is_split_unless_asked_otherwise():
    c = PartitioningConfig()
    assert (c.batch_axis, c.fsdp_axis, c.tensor_parallel_axes) == ("batch", "embed", None)
    assert (c.model_axis_size, c.replica_ici_axis_size, c.replica_dcn_axis_size) == (1, 1, 1)
    assert c.axis_resources == c.parameter_axis_resources == c.compute_axis_resources == {}


@pytest.mark.parametrize("axis", PARAMETER_AXES)
def test_every_axis_of_parameters_may_be_split(axis):
    assert PartitioningConfig(fsdp_axis=axis).fsdp_axis == axis


@pytest.mark.parametrize("setting", ["fsdp_axis", "tensor_parallel_axes"])
@pytest.mark.parametrize("axis", ["batch", "act_mlp", "", "EMBED"])
def test_an_axis_that_parameters_do_not_have_is_refused(setting, axis):
    with pytest.raises(ValidationError, match=f"no logical axis '{axis}'"):
        PartitioningConfig(**{setting: axis})


@pytest.mark.parametrize("axis", ["data", "embed", "act_batch", ""])
def test_the_axis_of_the_data_is_the_batch(axis):
    assert PartitioningConfig(batch_axis="batch").batch_axis == "batch"
    with pytest.raises(ValidationError, match="only 'batch' is an axis of the data"):
        PartitioningConfig(batch_axis=axis)


@pytest.mark.parametrize("setting", ["model_axis_size", "replica_ici_axis_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_other_sizes_are_whole_numbers_from_one(setting, value):
    assert getattr(PartitioningConfig(**{setting: 2}), setting) == 2
    with pytest.raises(ValidationError):
        PartitioningConfig(**{setting: value})


@pytest.mark.parametrize(
    ("fsdp", "tensor", "fits"),
    [
        ("embed", "embed", False),
        ("embed", ["mlp", "embed"], False),
        (["embed", "mlp"], "mlp", False),
        (["embed", "vocab"], ["mlp", "heads"], True),
        (None, "embed", True),
        ([], ["embed"], True),
        ("embed", None, True),
    ],
)
def test_an_axis_is_split_by_one_of_the_two(fsdp, tensor, fits):
    if fits:
        PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
    else:
        with pytest.raises(ValidationError, match="which fsdp_axis splits already") as refused:
            PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)
        assert refused.value.errors()[0]["ctx"]["field"] == "tensor_parallel_axes"
