"""Preparation of the caches of a run, also of one with several processes."""

import importlib.util
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from cache_building import build_cache

from lmtrain.data.config import DataConfig
from lmtrain.preprocess import prepare
from lmtrain.preprocess.executor import LOCAL
from lmtrain.preprocess.prepare import SplitCaches, find_caches, shared_text, start_build
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes


def test_ray_is_required_only_for_missing_shards(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(prepare, "Build", lambda caches, executor, follows: SimpleNamespace(start=lambda: executor))
    finished, missing = (SimpleNamespace(complete=is_complete) for is_complete in (True, False))
    several = Processes(1, 2, "host:1234")
    assert start_build(RunConfig(), SplitCaches({"": finished}, {"": finished}), several) is LOCAL
    with pytest.raises(UserError, match=r"Ray, which is not installed.*`lmtrain preprocess`"):
        start_build(RunConfig(), SplitCaches({"": finished}, {"": missing}), several)


@pytest.mark.parametrize("finished", [False, True])
def test_validation_text_that_is_also_training_text_logs_a_warning(tmp_path, settings, caplog, finished):
    """Copies and files matched by a glob count; other text of the same length does not."""
    for name, text in (("a", "one"), ("b", "two"), ("copy", "one"), ("other", "new")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text * 9}) + "\n")
    data = settings["data"] | {"cache_dir": str(tmp_path / "cache"), "train_urls": [f"{tmp_path}/[ab].jsonl"]}

    def shared(*validation):
        config = DataConfig(**data | {"validation_urls": [f"{tmp_path}/{name}.jsonl" for name in validation]})
        if finished:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            for split in ("train", "validation"):
                build_cache(config, split)
        caplog.clear()
        return [os.path.basename(url) for url in shared_text(find_caches(config))], caplog.text

    assert shared("other") == ([], "")
    found, logged = shared("other", "b", "copy")
    assert found == ["b.jsonl", "copy.jsonl"]
    assert f"{tmp_path}/b.jsonl, {tmp_path}/copy.jsonl: validation text is also training text" in logged
