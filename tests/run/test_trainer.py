"""Settings of a training run."""

import pytest
from pydantic import ValidationError

from lmtrain.run.trainer import TrainerConfig
from lmtrain.tracking.config import JsonConfig, NoopConfig, WandbConfig


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


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2**32},
        {"num_train_steps": 2**31},
        {"fsdp_axis": "width"},
        {"fsdp_axis": ["embed", "act_mlp"]},
        {"tensor_parallel_axes": ["mpl"]},
        {"tracker": {"type": "mlflow"}},
        {"tracker": ["wandb", "nonsense"]},
    ],
)
def test_invalid_settings_are_refused(change):
    (name,) = change
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**change)
    assert {problem["loc"][0] for problem in caught.value.errors()} == {name}
