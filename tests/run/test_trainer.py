"""Settings of a training run."""

from datetime import timedelta

import pytest
from pydantic import ValidationError

from lmtrain.run.trainer import TrainerConfig
from lmtrain.tracking.config import JsonConfig, NoopConfig, WandbConfig


def test_a_dumped_config_loads_as_an_equal_one():
    config = TrainerConfig(
        num_train_steps=7,
        mp="p=f32,c=bf16",
        tracker=[{"type": "json"}, {"type": "wandb"}],
        fsdp_axis=["embed", "vocab"],
        tensor_parallel_axes=["mlp"],
        checkpointer={"save_interval": "90s", "keep": [{"every": 3}]},
    )
    assert config.checkpointer.save_interval == timedelta(seconds=90)
    assert TrainerConfig(**config.model_dump(mode="json")) == config
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("value", "types"),
    [
        ({"type": "json"}, [JsonConfig]),
        ([{"type": "json"}], [JsonConfig]),
        ([{"type": "noop"}, {"type": "wandb"}], [NoopConfig, WandbConfig]),
        ({}, [WandbConfig]),
        ([], []),
    ],
)
def test_one_tracker_is_a_list_of_one(value, types):
    assert [type(tracker) for tracker in TrainerConfig(tracker=value).tracker] == types


@pytest.mark.parametrize("value", [None, "embed", ["embed", "vocab"], []])
def test_fsdp_axis_is_one_name_several_or_null(value):
    assert TrainerConfig(fsdp_axis=value).fsdp_axis == value


@pytest.mark.parametrize("value", [-1, 1, 16])
def test_valid_values_of_per_device_parallelism(value):
    assert TrainerConfig(per_device_parallelism=value).per_device_parallelism == value


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"seed": 2**32},
        {"seed": None},
        {"num_train_steps": 0},
        {"num_train_steps": 2**31},
        {"num_train_steps": 1.5},
        {"num_train_steps": True},
        {"train_batch_size": 0},
        {"steps_per_eval": 0},
        {"max_eval_batches": 0},
        {"model_axis_size": 0},
        {"fsdp_axis": 3},
        {"fsdp_axis": "width"},
        {"fsdp_axis": ["embed", "act_mlp"]},
        {"tensor_parallel_axes": ["mpl"]},
        {"batch_axis": "rows"},
        {"tensor_parallel_axes": "mpl"},
        {"tracker": {"type": "mlflow"}},
        {"tracker": ["wandb", "nonsense"]},
        {"tracker": None},
        {"crash_on_nan": "perhaps"},
        {"checkpointer": {"every": 5}},
        {"mp": 32},
        {"num_steps": 10},
    ],
)
def test_invalid_settings_are_refused(change):
    (name,) = change
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**change)
    assert {problem["loc"][0] for problem in caught.value.errors()} == {name}


def test_an_axis_cannot_be_split_over_two_mesh_axes():
    with pytest.raises(ValidationError, match="'embed' is already split by fsdp_axis"):
        TrainerConfig(tensor_parallel_axes=["mlp", "embed"])


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_seeds_may_have_32_bits(seed):
    assert TrainerConfig(seed=seed).seed == seed
