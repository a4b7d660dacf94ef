"""Run ids of instruction data differ by kind, and those of text are what they were."""

import pytest

from lmtrain.run.config import RunConfig
from lmtrain.run.run import identity, run_id

FILES = {"train_urls": ["a.jsonl"]}


def id_of(**data):
    return run_id(RunConfig.model_validate({"data": data}), "run", {})


def test_the_default_format_and_the_former_default_of_positions_change_no_id():
    plain = identity(RunConfig.model_validate({"data": FILES}))
    for more in ({"format": {"type": "text"}}, {"reset_positions": None}, {"reset_positions": False}):
        assert identity(RunConfig.model_validate({"data": FILES | more})) == plain
    assert identity(RunConfig.model_validate({"data": FILES | {"reset_positions": True}})) != plain


@pytest.mark.parametrize("mixed", [False, True])
def test_each_kind_of_format_is_another_run(mixed):
    formats = [{}, {"format": {"type": "chat"}}, {"format": {"type": "completion"}}]
    formats += [{"format": {"type": "chat", "loss_on": "last"}}, {"format": {"type": "chat"}, "reset_positions": False}]
    ids = set()
    for one in formats:
        positions = {name: value for name, value in one.items() if name == "reset_positions"}
        source = FILES | {name: value for name, value in one.items() if name == "format"}
        ids.add(id_of(**positions, configs={"a": source}) if mixed else id_of(**positions, **source))
    assert len(ids) == len(formats)


def test_a_format_next_to_configs_is_refused():
    with pytest.raises(ValueError, match="each source"):
        RunConfig.model_validate({"data": {"configs": {"a": FILES}, "format": {"type": "chat"}}})
