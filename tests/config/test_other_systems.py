"""Advice for settings of other systems: it names settings that exist, for names that do not."""

import re

import pytest
import yaml

from lmtrain.config.describe import describe
from lmtrain.config.load import load_config
from lmtrain.config.spellings import ADVICE
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError

SETTINGS = {setting.name for group in describe(RunConfig) for setting in group.settings}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_names_existing_settings_for_a_name_that_does_not_exist(name):
    assert not [setting for setting in SETTINGS if setting.rpartition(".")[2] == name]
    for named in re.findall(r"\b(?:data|model|trainer|optimizer)\.[a-z_.]*[a-z_]", ADVICE[name]):
        assert named in SETTINGS, named


def test_an_unknown_setting_gets_the_advice_with_its_place(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"optimizer": {"cooldown": 0.1}, "model": {"n_layer": 2}}))
    with pytest.raises(UserError) as error:
        load_config(RunConfig, str(path), [("trainer.require_accelerator", "true"), ("trainer.num_train_step", "3")])
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert f"{path}:4: optimizer.cooldown: no such setting; set optimizer.decay" in lines
    assert any(line.startswith(f"{path}:2: model.n_layer: no such setting; set model.num_layers") for line in lines)
    assert any(line.startswith("--trainer.require_accelerator: no such setting; remove it") for line in lines)
    assert "--trainer.num_train_step: no such setting; did you mean trainer.num_train_steps?" in lines
