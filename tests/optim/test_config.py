"""Settings of the optimizer: an int is steps and a float a fraction; invalid values are refused."""

import pytest
from pydantic import ValidationError

from lmtrain.optim.config import AdamConfig


@pytest.mark.parametrize("name", ["warmup", "decay"])
@pytest.mark.parametrize("value", [0, 1, 5000, 0.0, 0.25, 1.0])
def test_a_length_keeps_its_type(name, value):
    """`1` is one step and `1.0` the entire run, so the type must be kept, also in a dump."""
    config = AdamConfig(**{name: value})
    again = AdamConfig.model_validate_json(config.model_dump_json())
    for one in (config, again):
        assert (getattr(one, name), type(getattr(one, name))) == (value, type(value))


@pytest.mark.parametrize("value", [1.5, -0.1, 2.0, float("nan"), float("inf")])
def test_a_float_that_is_not_a_fraction_is_refused(value):
    with pytest.raises(ValidationError, match=r"fraction from 0\.0 to 1\.0, or a whole number of steps"):
        AdamConfig(warmup=value)


@pytest.mark.parametrize(
    "change",
    [
        {"warmup": -1},
        {"warmup": "10%"},
        {"warmup": True},
        {"warmup": None},
        {"decay": -3},
        {"learning_rate": float("nan")},
        {"cycles": 0},
        {"cycles": []},
        {"cycles": 2.0},
        {"cycle_length": 1.5},
        {"cycle_length": [10, 0]},
        {"rewarmup": -1},
        {"skip_bad_steps": 3.5},
    ],
)
def test_invalid_settings_are_refused(change):
    (name,) = change
    with pytest.raises(ValidationError) as caught:
        AdamConfig(**change)
    assert {problem["loc"][0] for problem in caught.value.errors()} == {name}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycles": 2, "cycle_length": 10}, "set together with cycles"),
        ({"cycles": [20, 10]}, r"must increase, got \[20, 10\]"),
        ({"cycles": [10, 10]}, r"must increase, got \[10, 10\]"),
        ({"lr_schedule": "inv", "min_lr_ratio": 0}, "lr_schedule inv requires"),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AdamConfig(**settings)
