"""Fixtures of settings."""

import pytest

from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(text, *overrides, name=text)` loads main.yaml with `--name value` pairs over it; (config, tree)."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(text, *overrides, **others):
        for name, content in {"main": text, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        loaded = load_config(RunConfig, "main.yaml", overrides)
        return loaded.config, loaded.tree

    return write_and_load
