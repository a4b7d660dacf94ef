"""Settings of trackers: the member of the choice is the one that `type` names."""

import pytest
from pydantic import TypeAdapter, ValidationError

from lmtrain.tracking.config import JsonConfig, NoopConfig, TensorboardConfig, TrackerConfig, WandbConfig
from lmtrain.train.config import TrainerConfig

TRACKER = TypeAdapter(TrackerConfig)


@pytest.mark.parametrize(
    ("written", "section"),
    [
        ({"type": "wandb", "project": "p"}, WandbConfig(project="p")),
        ({"project": "p"}, WandbConfig(project="p")),
        ({}, WandbConfig()),
        ({"type": "tensorboard", "logdir": "x"}, TensorboardConfig(logdir="x")),
        ({"type": "json"}, JsonConfig()),
        ({"type": "noop"}, NoopConfig()),
        (JsonConfig(), JsonConfig()),
    ],
)
def test_type_names_the_tracker_and_without_it_it_is_wandb(written, section):
    assert TRACKER.validate_python(written) == section


@pytest.mark.parametrize("section", [WandbConfig(tags=["a"], mode="offline"), TensorboardConfig(), JsonConfig()])
def test_what_is_dumped_reads_back_the_same(section):
    assert TRACKER.validate_python(TRACKER.dump_python(section, mode="json")) == section


@pytest.mark.parametrize(
    "written", [{"type": "comet"}, {"type": "WandB"}, {"type": None}, {"type": []}, None, 3, "foo", []]
)
def test_anything_else_is_refused_with_the_choices(written):
    with pytest.raises(ValidationError, match="no such tracker"):
        TRACKER.validate_python(written)


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ({"type": "json", "logdir": "x"}, ("json", "logdir")),
        ({"type": "tensorboard", "project": "x"}, ("tensorboard", "project")),
        ({"mode": "off"}, ("wandb", "mode")),
        ({"tags": "a"}, ("wandb", "tags")),
    ],
)
def test_a_setting_of_another_tracker_is_refused(written, where):
    with pytest.raises(ValidationError) as caught:
        TRACKER.validate_python(written)
    assert [error["loc"] for error in caught.value.errors()] == [where]


def test_one_tracker_needs_no_list():
    assert TrainerConfig(tracker={"type": "json"}).tracker == [JsonConfig()]
    assert TrainerConfig(tracker=[{"type": "json"}, {"type": "noop"}]).tracker == [JsonConfig(), NoopConfig()]
    assert TrainerConfig(tracker=[]).tracker == []
    assert TrainerConfig().tracker == [WandbConfig()]
