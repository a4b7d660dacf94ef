"""Every shipped config loads, and writes only to the working directory."""

from pathlib import Path

import pytest

from lmtrain.config.load import load_config, shipped_configs
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import run_id

CONFIGS = sorted(Path(shipped_configs()).glob("*.yaml"))


def test_there_are_shipped_configs():
    assert "gpt2_nano" in [path.stem for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_by_path_and_by_name_as_the_same_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_path, by_name = load_config(RunConfig, str(path)), load_config(RunConfig, path.stem)
    assert by_path.config == by_name.config
    assert run_id(by_name.config, by_name.stem, {}).startswith(f"{path.stem}-")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_writes_only_to_the_working_directory(path):
    config = load_config(RunConfig, str(path)).config
    folders = [config.data.cache_dir, config.trainer.log_dir, config.trainer.checkpointer.base_path]
    assert not [folder for folder in folders if folder.startswith(("/", "~", ".."))]
