"""Every shipped config loads, and writes only to the working directory."""

from pathlib import Path

import pytest

from lmtrain.config.load import load_config, shipped_configs
from lmtrain.run.config import RunConfig
from lmtrain.run.run import run_id

CONFIGS = sorted(Path(shipped_configs()).glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_by_path_and_by_name_as_the_same_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_path, by_name = load_config(RunConfig, str(path)), load_config(RunConfig, path.stem)
    config = by_path.config
    assert config == by_name.config
    folders = [config.data.cache_dir, config.trainer.log_dir, config.trainer.checkpointer.base_path]
    assert not [folder for folder in folders if folder.startswith(("/", "~", ".."))]
    assert run_id(by_name.config, by_name.stem, {}).startswith(f"{path.stem}-")
