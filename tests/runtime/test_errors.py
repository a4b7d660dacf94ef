"""Suggested names: the closest known one, or none."""

from typing import Literal

import pytest

from lmtrain.config.describe import known_paths
from lmtrain.config.section import Section
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import suggest_name

PATHS = known_paths(RunConfig, {})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("modle", "model"),
        ("trainer.checkpointer.save_intervall", "trainer.checkpointer.save_interval"),
        ("trainer.learning_rate", "optimizer.learning_rate"),
        ("seq_len", "model.seq_len"),
        ("zzzz", None),
        ("trainer.tracker.foo", None),
    ],
)
def test_the_suggested_setting(wrong, right):
    assert suggest_name(wrong, PATHS) == right


def test_a_similar_name_in_the_section_beats_the_same_name_elsewhere():
    assert suggest_name("optimizer.sed", ["optimizer.seed", "trainer.sed"]) == "optimizer.seed"


class Left(Section):
    type: Literal["left"] = "left"
    reach: int = 0


class Right(Section):
    type: Literal["right"] = "right"
    grip: int = 0


class Whole(Section):
    hand: Left | Right = Left()
    hands: list[Left] | None = None


def test_known_paths_list_sections_and_settings_through_unions_but_not_those_in_lists():
    """A setting of an entry cannot be written as `hands.reach`, so it is no advice for a name that is unknown."""
    assert known_paths(Whole, {}) == ["hand", "hand.type", "hand.reach", "hand.type", "hand.grip", "hands"]
    assert known_paths(Whole, {"hand": {"type": "right"}})[:3] == ["hand", "hand.type", "hand.grip"]
    for data in (None, {"hand": [1]}, {"hand": {"type": "neither"}}):
        assert {"hand.reach", "hand.grip"} <= set(known_paths(Whole, data))
