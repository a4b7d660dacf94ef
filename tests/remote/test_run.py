"""A run with config, text, cache and checkpoints in a bucket; only its logs are local."""

import hashlib
import os

import pytest
import yaml
from conftest import TRAIN_FILES, VALIDATION_FILES, logged


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["gs", "s3"], indirect=True)
def test_a_run_with_config_text_cache_and_checkpoints_in_a_bucket(store, settings, lmtrain, tmp_path):
    for path in (*TRAIN_FILES, *VALIDATION_FILES):
        with open(path, "rb") as file:
            store.put(f"text/{os.path.basename(path)}", file.read())
    settings["data"] |= {
        "train_urls": [f"{store.url}/text/train.*.jsonl*"],
        "validation_urls": [f"{store.url}/text/validation.jsonl"],
        "cache_dir": f"{store.url}/cache",
        "mirror_dir": "mirror",
    }
    settings["trainer"] |= {"num_train_steps": 2, "steps_per_eval": 2, "checkpointer": {"save_interval": None}}
    checkpoints = f"{store.url}/checkpoints"
    settings["trainer"]["checkpointer"]["base_path"] = checkpoints
    settings["optimizer"]["warmup"] = 1
    store.put("configs/parts/data.yaml", yaml.safe_dump(settings.pop("data")).encode())
    store.put("configs/tiny.yaml", f"{yaml.safe_dump(settings)}data: !include parts/data.yaml\n".encode())

    built = lmtrain("preprocess", f"{store.url}/configs/tiny.yaml", code=0)
    assert f"{store.url}/cache/train: complete, 200 documents" in built.stderr
    cache = store.contents("cache")

    trained = lmtrain("train", f"{store.url}/configs/tiny.yaml", "--trainer.id", "tiny", code=0)
    assert "shards to build" not in trained.stderr
    assert list(logged(tmp_path, "eval/loss", "tiny")) == [2]
    assert store.contents("cache") == cache
    copies = {hashlib.sha256(content).hexdigest() for name, content in cache.items() if name.endswith("arrayrecord")}
    assert {path.stem for path in (tmp_path / "mirror").iterdir()} == copies

    assert "step-2         permanent" in lmtrain("checkpoint", "list", checkpoints, code=0).stdout
    more = ["--trainer.id", "tiny", "--trainer.num_train_steps", "3"]
    longer = lmtrain("train", f"{store.url}/configs/tiny.yaml", *more, code=0)
    assert "resuming after step 2 from " in longer.stderr
    assert f"{checkpoints}/tiny/step-3" in longer.stderr
