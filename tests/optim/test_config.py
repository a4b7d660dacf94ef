"""Settings of the optimizer: an int is steps and a float a fraction; cycles in steps; invalid values are refused."""

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtrain.optim.config import AdamConfig, Cycle, build_cycles


@pytest.mark.parametrize(("name", "value"), [("warmup", 1), ("warmup", 1.0), ("decay", 0), ("decay", 0.0)])
def test_a_length_keeps_its_type(name, value):
    """`1` is one step and `1.0` the entire run, so the type must be kept, also in a dump."""
    config = AdamConfig(**{name: value})
    again = AdamConfig.model_validate_json(config.model_dump_json())
    for one in (config, again):
        assert (getattr(one, name), type(getattr(one, name))) == (value, type(value))


@pytest.mark.parametrize(
    "change",
    [
        {"warmup": -1},
        {"warmup": 1.5},
        {"warmup": float("nan")},
        {"warmup": True},
        {"learning_rate": float("nan")},
        {"cycles": []},
        {"cycles": 2.0},
        {"cycle_length": [10, 0]},
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
        ({"cycles": 2, "cycle_length": 10}, "cycles"),
        ({"cycles": [10, 10]}, r"\[10, 10\]"),
        ({"lr_schedule": "inv", "min_lr_ratio": 0}, "lr_schedule inv"),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AdamConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [100]),
        ({"cycles": 3}, [33, 66, 100]),
        ({"cycles": [30, 60]}, [30, 60, 100]),
        ({"cycle_length": 30}, [30, 60, 100]),
        ({"cycle_length": 0.5}, [50, 100]),
        ({"cycle_length": 300}, [100]),
        ({"cycle_length": [40, 60]}, [40, 100]),
    ],
)
def test_cycles_end_at_the_steps_of_the_reference_and_cover_the_run(settings, ends):
    cycles = build_cycles(AdamConfig(warmup=0, **settings), 100)
    assert [cycle.end for cycle in cycles] == ends
    assert [cycle.start for cycle in cycles] == [0, *ends[:-1]]


def test_fractions_refer_to_their_cycle_and_later_cycles_use_rewarmup():
    config = AdamConfig(cycles=[20, 60], warmup=0.5, rewarmup=0.25, decay=0.5)
    assert build_cycles(config, 100) == [
        Cycle(start=0, end=20, warmup=10, decay=10),
        Cycle(start=20, end=60, warmup=10, decay=20),
        Cycle(start=60, end=100, warmup=10, decay=20),
    ]
    assert build_cycles(AdamConfig(warmup=1.0), 9) == [Cycle(start=0, end=9, warmup=9, decay=0)]
    assert build_cycles(AdamConfig(warmup=1), 9) == [Cycle(start=0, end=9, warmup=1, decay=8)]
    without = AdamConfig(lr_schedule="constant", decay=0, warmup=0.5)  # a fraction is rounded down
    assert build_cycles(without, 9) == [Cycle(start=0, end=9, warmup=4, decay=0)]


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"warmup": 51, "cycles": 2}, "warmup", ["51", "cycle 1", "0 to 50"]),
        ({"rewarmup": 51, "warmup": 0, "cycles": 2}, "rewarmup", ["51", "cycle 2", "50 to 100"]),
        ({"warmup": 50, "decay": 51}, "decay", ["51", "50 of warmup", "100"]),
        ({"decay": 0}, "decay", ["lr_schedule: constant"]),
        ({"cycles": 101}, "cycles", ["101", "100"]),
        ({"cycles": [50, 101]}, "cycles", ["101", "100"]),
        ({"cycle_length": [50, 51]}, "cycle_length", ["101", "100"]),
        ({"cycle_length": 0.001}, "cycle_length", ["0.001", "100"]),
    ],
)
def test_lengths_that_do_not_fit_are_errors_with_setting_and_sizes(settings, field, words):
    with pytest.raises(PydanticCustomError) as caught:
        build_cycles(AdamConfig(**settings), 100)
    assert caught.value.context["field"] == field
    assert all(word in caught.value.message() for word in words)
