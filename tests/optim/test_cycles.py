"""Cycles of the learning rate in integer steps, compared with the reference; errors for lengths that do not fit."""

import pytest
from pydantic_core import PydanticCustomError

from lmtrain.optim.config import AdamConfig, Cycle, build_cycles, num_steps


@pytest.mark.parametrize(
    ("length", "whole", "expected"), [(1, 100, 1), (1.0, 100, 100), (0, 9, 0), (0.0, 9, 0), (0.5, 9, 4), (30, 9, 30)]
)
def test_an_int_is_steps_and_a_float_a_fraction_rounded_down(length, whole, expected):
    assert num_steps(length, whole) == expected


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [100]),
        ({"cycles": 2}, [50, 100]),
        ({"cycles": 3}, [33, 66, 100]),
        ({"cycles": 100}, list(range(1, 101))),
        ({"cycles": [30, 60]}, [30, 60, 100]),
        ({"cycle_length": 25}, [25, 50, 75, 100]),
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
    ("settings", "field", "message"),
    [
        ({"warmup": 101}, "warmup", "101 steps, longer than the run (100 steps)"),
        ({"warmup": 51, "cycles": 2}, "warmup", "51 steps, longer than cycle 1 (steps 0 to 50)"),
        ({"rewarmup": 51, "warmup": 0, "cycles": 2}, "rewarmup", "51 steps, longer than cycle 2 (steps 50 to 100)"),
        ({"warmup": 50, "decay": 51}, "decay", "51 steps, with 50 of warmup, longer than the run (100 steps)"),
        ({"warmup": 0.5, "decay": 0.6}, "decay", "60 steps, with 50 of warmup, longer than the run"),
        ({"decay": 0}, "decay", "0 is less than one step; for no decay set lr_schedule: constant"),
        ({"cycles": 101}, "cycles", "101 cycles do not fit into 100 steps"),
        ({"cycles": [50, 101]}, "cycles", "step 101 is after the end of the run (step 100)"),
        ({"cycle_length": [50, 51]}, "cycle_length", "101 steps in total, the run has only 100"),
        ({"cycle_length": 0.001}, "cycle_length", "0.001 of 100 steps is less than one step"),
    ],
)
def test_lengths_that_do_not_fit_are_errors_with_setting_and_sizes(settings, field, message):
    with pytest.raises(PydanticCustomError) as caught:
        build_cycles(AdamConfig(**settings), 100)
    assert caught.value.context["field"] == field
    assert message in caught.value.message()


def test_a_constant_rate_may_have_no_decay():
    assert build_cycles(AdamConfig(lr_schedule="constant", decay=0, warmup=0), 100) == [
        Cycle(start=0, end=100, warmup=0, decay=0)
    ]
