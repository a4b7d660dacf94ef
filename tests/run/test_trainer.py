"""Settings of a training run, and its batch sizes."""

import pytest
from pydantic import ValidationError

from lmtrain.run.trainer import Batching, TrainerConfig, check_seq_len, choose_batching
from lmtrain.runtime.errors import UserError
from lmtrain.tracking.config import JsonConfig, NoopConfig, WandbConfig


@pytest.mark.parametrize(
    ("value", "types"),
    [
        ({"type": "json"}, [JsonConfig]),
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
        {"fsdp_axis": ["embed", "act_mlp"]},
        {"tensor_parallel_axes": ["mpl"]},
        {"tracker": ["wandb", "nonsense"]},
    ],
)
def test_invalid_settings_are_refused(change):
    (name,) = change
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**change)
    assert {problem["loc"][0] for problem in caught.value.errors()} == {name}


def plan(batch: int, shards: int, per_device: int = -1, per_device_eval: int = -1) -> Batching:
    config = TrainerConfig(
        train_batch_size=batch, per_device_parallelism=per_device, per_device_eval_parallelism=per_device_eval
    )
    return choose_batching(config, shards)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, 1), Batching({32: 1}, 32)),
        ((32, 4, 2), Batching({32: 4}, 8)),
        ((32, 4, 2, 16), Batching({32: 4}, 64)),
        ((32, 4, -1, 3), Batching({32: 1}, 12)),
    ],
)
def test_sizes(arguments, expected):
    assert plan(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "valid"), [((30, 8), "24 or 32"), ((3, 8), "8"), ((32, 4, 3), "2 or 4"), ((32, 4, 16), "4 or 8")]
)
def test_sizes_that_do_not_divide_are_refused_with_valid_sizes(arguments, valid):
    with pytest.raises(UserError, match=rf"train_batch_size.* {arguments[1]} devices.* {valid}$"):
        plan(*arguments)


@pytest.mark.parametrize(("name", "value"), [("per_device_parallelism", 0), ("per_device_eval_parallelism", -2)])
def test_a_parallelism_is_automatic_or_positive(name, value):
    with pytest.raises(ValidationError):
        TrainerConfig(**{name: value})


def test_sequences_that_do_not_divide_over_devices_are_an_error_with_lengths_that_do():
    for parts in (1, 2, 8):
        check_seq_len(1024, parts)
    with pytest.raises(UserError, match=r"model\.seq_len: 1,000 .* 16 devices .* 10 or 20 devices"):
        check_seq_len(1000, 16)
    check_seq_len(48, 2, halves=True)
    with pytest.raises(UserError, match=r"model\.seq_len: 42 .* 4 parts"):
        check_seq_len(42, 2, halves=True)
