"""Who builds the caches of a run of several processes."""

import importlib.util
from types import SimpleNamespace

import pytest

from lmtrain.commands import caches
from lmtrain.commands.caches import Plans, start_build
from lmtrain.config.errors import UserError
from lmtrain.run_config import RunConfig
from lmtrain.runtime.processes import Processes


def test_only_what_is_missing_needs_ray_to_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(caches, "Build", lambda plans, executor, follows: SimpleNamespace(start=lambda: executor))
    complete, missing = SimpleNamespace(complete=True), SimpleNamespace(complete=False)
    several = Processes(1, 2, "host:1234")
    assert "local" in start_build(RunConfig(), Plans({"": complete}, {"": complete}), several).label
    with pytest.raises(UserError, match=r"Ray, which is not installed.*`lmtrain preprocess`"):
        start_build(RunConfig(), Plans({"": complete}, {"": missing}), several)
