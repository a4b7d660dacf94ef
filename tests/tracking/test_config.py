"""Settings of trackers: `type` selects the tracker."""

import inspect

import pytest
from pydantic import TypeAdapter, ValidationError

from lmtrain.tracking.config import (
    CustomConfig,
    NoopConfig,
    TensorboardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)

TRACKER = TypeAdapter(TrackerConfig)


@pytest.mark.parametrize(
    ("written", "section"),
    [
        ({"project": "p"}, WandbConfig(project="p")),
        ({}, WandbConfig()),
        ({"type": "tensorboard", "logdir": "x"}, TensorboardConfig(logdir="x")),
        ({"type": "noop"}, NoopConfig()),
        ({"type": "trackio", "space_id": "me/runs"}, TrackioConfig(space_id="me/runs")),
        (
            {"type": "our.tools.mine.Tracker", "arguments": {"a": [1]}},
            CustomConfig(type="our.tools.mine.Tracker", arguments={"a": [1]}),
        ),
        ({"type": "our.tools:Tracker"}, CustomConfig(type="our.tools:Tracker")),
    ],
)
def test_type_selects_the_tracker_and_defaults_to_wandb(written, section):
    assert TRACKER.validate_python(written) == section


@pytest.mark.parametrize(
    "written",
    [
        *({"type": name} for name in ("comet", "mine.Tracker()", "mine.py:Tracker:x", "tools/mine.Tracker", None)),
        *(None, "mine.Tracker"),
    ],
)
def test_unknown_types_are_refused_with_the_choices(written):
    with pytest.raises(ValidationError) as caught:
        TRACKER.validate_python(written)
    (error,) = caught.value.errors()
    choices = ["wandb", "tensorboard", "trackio", "json", "noop", "package.module.Class"]
    assert error["ctx"]["expected_tags"] == ", ".join(map(repr, choices))


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ({"type": "json", "logdir": "x"}, ("json", "logdir")),
        ({"mode": "off"}, ("wandb", "mode")),
        ({"resume": "sometimes"}, ("wandb", "resume")),
        ({"type": "trackio", "resume": True}, ("trackio", "resume")),
        ({"type": "mine.Tracker", "arguments": [1]}, ("package.module.Class", "arguments")),
    ],
)
def test_a_setting_of_another_tracker_is_refused(written, where):
    with pytest.raises(ValidationError) as caught:
        TRACKER.validate_python(written)
    assert {error["loc"][:2] for error in caught.value.errors()} == {where}


def test_the_settings_are_keywords_of_wandb_init():
    import wandb

    keywords = set(inspect.signature(wandb.init).parameters)
    assert set(WandbConfig.model_fields) - {"type", "save_code", "save_xla_dumps", "init"} <= keywords


def test_every_setting_of_trackio_is_a_keyword_of_its_init():
    import trackio

    assert set(TrackioConfig.model_fields) - {"type"} <= set(inspect.signature(trackio.init).parameters)
