"""Secrets of a config that was saved without them."""

import pytest
import yaml

from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import fill_masked, require_secrets
from lmtrain.runtime.errors import UserError

WANDB = {"type": "wandb", "settings": {"api_key": "wandb-key"}, "config": {"deep": {"password": 12345678}}}
SETTINGS = {
    "data": {"train_urls": ["https://me:word@host/a.jsonl?version=1&sig=b", "plain.jsonl"]},
    "trainer": {"tracker": WANDB, "checkpointer": {"base_path": "sftp://me:word@host/checkpoints"}},
}
PLAIN = {"data": {"train_urls": ["plain.jsonl"]}, "trainer": {"tracker": {"type": "json"}}}


@pytest.fixture
def load(tmp_path):
    """`load(settings)` loads a file with them."""

    def load_settings(settings, name="a.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings))
        return load_config(RunConfig, str(path))

    return load_settings


@pytest.fixture
def saved(load):
    """The config with SETTINGS, as its run has saved it."""
    return load(resolved(load(SETTINGS).config), "saved.yaml")


def test_secrets_are_those_of_the_config_that_is_given(load, saved):
    given = load(SETTINGS).config
    assert saved.config != given
    filled = fill_masked(saved, given, {})
    assert filled.config == given
    require_secrets(filled, trains=True)


def test_secrets_of_a_setting_with_another_value_are_not_taken(load, saved):
    other = {"data": {"train_urls": ["https://me:word@host/b.jsonl?sig=b"]}}
    assert fill_masked(saved, load(other).config, {}).config == saved.config


def test_a_value_that_an_earlier_version_masked_is_filled_too(load, saved):
    values = resolved(load(SETTINGS).config)
    values["data"]["train_urls"][0] = "https://***@host/a.jsonl?***"  # it masked all parameters
    assert fill_masked(load(values, "saved.yaml"), load(SETTINGS).config, {}).config == load(SETTINGS).config


def test_a_setting_of_wandb_is_left_to_its_environment_variable(saved):
    filled = fill_masked(saved, None, {"WANDB_API_KEY": "from environment", "WANDB_PASSWORD": "of no setting"})
    (tracker,) = filled.config.trainer.tracker
    assert tracker.init == {"settings": {}, "config": {"deep": {"password": "***"}}}


def test_a_config_without_masked_values_is_unchanged(load):
    loaded = load(PLAIN)
    assert fill_masked(loaded, RunConfig(), {"WANDB_API_KEY": "x"}) is loaded
    require_secrets(loaded, trains=True)


def test_missing_secrets_are_an_error_that_names_all_fields(saved):
    with pytest.raises(UserError) as error:
        require_secrets(saved, trains=True)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("saved.yaml: secrets are masked, since they are not saved with a run")
    assert sorted(lines[1:-1]) == [
        "  trainer.checkpointer.base_path",
        "  trainer.tracker[0].init.config.deep.password",
        "  trainer.tracker[0].init.settings.api_key: set WANDB_API_KEY",
    ]
    assert "--run ID" in lines[-1]


def test_only_training_needs_the_secrets_of_trackers_and_of_initial_states(load):
    settings = SETTINGS | {"trainer": {"tracker": WANDB, "initialize_from": "sftp://me:word@host/checkpoints"}}
    saved = load(resolved(load(settings).config), "saved.yaml")
    require_secrets(saved)
    with pytest.raises(UserError, match=r"trainer\.tracker\[0\]"):
        require_secrets(saved, trains=True)
