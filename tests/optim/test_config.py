"""Settings of the optimizer: an int is steps and a float a fraction; cycles in steps; invalid values are refused."""

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtrain.optim.config import AdamConfig, Cycle, build_cycles, num_steps


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
        ({"cycles": 2, "cycle_length": 10}, "cycles"),
        ({"cycles": [20, 10]}, r"\[20, 10\]"),
        ({"cycles": [10, 10]}, r"\[10, 10\]"),
        ({"lr_schedule": "inv", "min_lr_ratio": 0}, "lr_schedule inv requires"),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AdamConfig(**settings)


@pytest.mark.parametrize(
    ("length", "whole", "expected"), [(1, 100, 1), (1.0, 100, 100), (0, 9, 0), (0.0, 9, 0), (0.5, 9, 4), (30, 9, 30)]
)
def test_an_int_is_steps_and_a_float_a_fraction_rounded_down(length, whole, expected):
    assert num_steps(length, whole) == expected


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [100]),
        ({"cycles": 3}, [33, 66, 100]),
        ({"cycles": [30, 60]}, [30, 60, 100]),
        ({"cycle_length": 30}, [30, 60, 100]),
        ({"cycle_length": 0.5}, [50, 100]),
        ({"cycle_length": 300}, [100]),
        ({"cycle_length": [20, 30]}, [20, 50, 100]),
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


def test_without_decay_setting_all_steps_after_the_warmup_decay():
    assert build_cycles(AdamConfig(warmup=10), 100) == [Cycle(start=0, end=100, warmup=10, decay=90)]
    assert build_cycles(AdamConfig(warmup=1.0), 100) == [Cycle(start=0, end=100, warmup=100, decay=0)]


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"warmup": 101}, "warmup", ["101", "100"]),
        ({"warmup": 51, "cycles": 2}, "warmup", ["51", "cycle 1", "0 to 50"]),
        ({"rewarmup": 51, "warmup": 0, "cycles": 2}, "rewarmup", ["51", "cycle 2", "50 to 100"]),
        ({"warmup": 50, "decay": 51}, "decay", ["51", "50 of warmup", "100"]),
        ({"warmup": 0.5, "decay": 0.6}, "decay", ["60", "50 of warmup"]),
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


def test_a_constant_rate_may_have_no_decay():
    assert build_cycles(AdamConfig(lr_schedule="constant", decay=0, warmup=0), 100) == [
        Cycle(start=0, end=100, warmup=0, decay=0)
    ]
