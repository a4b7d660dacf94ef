"""Text, token caches, configs and a whole run in buckets, with emulators of Google Cloud Storage and Amazon S3."""

import gzip
import hashlib
import json
import os
import threading

import cache_building
import numpy as np
import pytest
import yaml
from cache_building import build_cache
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES, logged
from token_files import documents, llm_c, megatron

from lmtrain.config.yaml_loader import load_file
from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.caches import open_store
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.executor import Executor
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.preprocess.write_shard import build_shard
from lmtrain.runtime import storage
from lmtrain.runtime.errors import UserError

# In the order of the sources below, one shard each; more than the minimum that a mirror keeps.
NAMES = [f"{letter}{number}.jsonl.gz" for letter in "ba" for number in range(5)]
SHARDS = [f"train/shard-{index:05d}-of-00010" for index in range(10)]

ADVICE = {"gs": "gcloud auth application-default login", "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"}


def text_of(name):
    lines = "".join(json.dumps({"text": f"{name} has the line {i}"}) + "\n" for i in range(20 + ord(name[1])))
    return gzip.compress(lines.encode(), mtime=0)


def build_in_this_process(monkeypatch):
    """Build without worker processes, which take seconds to start."""

    def run(jobs, on_counts, stopped):
        return ((number, build_shard(job, lambda *counts: None)) for number, job in enumerate(jobs))

    monkeypatch.setattr(cache_building, "choose_executor", lambda *arguments: Executor("this process", run))


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    build_in_this_process(monkeypatch)


def config(root, **changes):
    """A config of the files and the cache in the folder `root`."""
    urls = [f"{root}/text/{{b,a}}*.jsonl.gz"]
    return DataConfig(**{"train_urls": urls, "cache_dir": f"{root}/cache", "tokenizer": str(TOKENIZER)} | changes)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same files and their cache in a local folder; its config."""
    root = tmp_path_factory.mktemp("local")
    (root / "text").mkdir()
    for name in [*NAMES, "c0.jsonl.gz"]:
        (root / "text" / name).write_bytes(text_of(name))
    (root / "cache" / "train").mkdir(parents=True)
    for job in find_cache(config(root), "train").jobs.values():
        build_shard(job, lambda *counts: None)
    build_cache(config(root), "train")
    return config(root)


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.long)])
def finished(request, new_store):
    """The same files and their cache in a bucket, and its contents."""
    store = new_store(request.param)
    for name in [*NAMES, "c0.jsonl.gz"]:
        store.put(f"text/{name}", text_of(name))
    with pytest.MonkeyPatch.context() as patch:
        build_in_this_process(patch)
        build_cache(config(store.url), "train")
    return store, store.contents()


def all_tokens(wanted):
    """The tokens of a finished cache, after its mirror has prefetched."""
    opened = open_store(wanted, find_cache(wanted, "train"))
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join()
    return opened.read(np.array([0]), opened.shards.tokens)[0][0].tolist()


def test_braces_and_globs_find_the_files_in_order_and_the_cache_has_the_files_of_a_local_one(finished, local):
    store, contents = finished
    shards = load_manifest(f"{store.url}/cache/train").shards
    assert [shard.source["url"] for shard in shards] == [f"{store.url}/text/{name}" for name in NAMES]
    files = {f"cache/{shard}.{extension}" for shard in SHARDS for extension in ("arrayrecord", "json")}
    assert {name for name in contents if name.startswith("cache/")} == files | {"cache/train/manifest.json"}
    for shard in SHARDS:
        with open(f"{local.cache_dir}/{shard}.arrayrecord", "rb") as file:
            assert contents[f"cache/{shard}.arrayrecord"] == file.read()


def test_files_of_token_ids_are_read_from_a_bucket_and_a_change_is_noticed(finished, tmp_path):
    """Those of Megatron-LM with their index, a cache by its URL, and a local file among them."""
    store, docs = finished[0], [documents(seed, 20) for seed in range(2)]
    for name, write in (("a.bin", megatron), ("b.bin", llm_c)):
        write(tmp_path / name, docs[0])
    for name in ("a.bin", "a.idx"):
        store.put(f"ids/{name}", (tmp_path / name).read_bytes())
    settings = {"tokenizer": "byte", "format": {"type": "tokens"}, "mirror_dir": str(tmp_path / "mirror")}
    urls = [f"{store.url}/ids/a.bin", str(tmp_path / "b.bin")]
    remote = DataConfig(train_urls=urls, cache_dir=str(tmp_path / "one"), **settings)
    local = DataConfig(train_urls=[str(tmp_path / "a.bin"), urls[1]], cache_dir=str(tmp_path / "two"), **settings)
    for wanted in (remote, local):
        build_cache(wanted, "train")
    stores = [open_store(wanted, find_cache(wanted, "train")) for wanted in (remote, local)]
    for found, expected in zip(*(store.read(np.array([0, 500]), 3000) for store in stores), strict=True):
        np.testing.assert_array_equal(found, expected)
    with_cache = settings | {"tokenizer": str(TOKENIZER), "train_urls": [f"{store.url}/cache/train"]}
    by_url = DataConfig(cache_dir=str(tmp_path / "three"), **with_cache)
    build_cache(by_url, "train")
    assert all_tokens(by_url) == all_tokens(config(store.url, mirror_dir=str(tmp_path / "mirror")))
    store.put("ids/a.bin", (tmp_path / "a.bin").read_bytes()[::-1])
    with pytest.raises(UserError, match=r"a.bin has changed since it was cached"):
        find_cache(remote, "train")
    store.delete("ids/a.bin", "ids/a.idx")


def test_only_missing_shards_of_a_cache_in_a_bucket_are_built_again(finished):
    bucket, complete = finished[0], dict(finished[1])
    bucket.delete("cache/train/manifest.json", f"cache/{SHARDS[3]}.arrayrecord")
    kept = f"cache/{SHARDS[0]}.json"
    complete[kept] += b"\n"  # still valid; lost if the marker is written again
    bucket.put(kept, complete[kept])
    build_cache(config(bucket.url), "train")
    assert bucket.contents() == complete


def test_changes_by_another_process_are_visible(store, tmp_path):
    old, new = store.put("folder/old", b"1"), f"{store.url}/folder/new"
    assert storage.list_names(f"{store.url}/folder") == ["old"]
    store.put("folder/old", b"twenty-two")
    store.put("folder/new", b"333")
    assert [storage.file_size(url) for url in (old, new)] == [10, 3]
    assert [storage.read_bytes(url) for url in (old, new)] == [b"twenty-two", b"333"]
    assert storage.list_names(f"{store.url}/folder") == ["new", "old"]
    store.put("folder/newest", b"4444")
    storage.download(f"{store.url}/folder/newest", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == b"4444"


def test_tokens_read_through_a_mirror_are_those_of_the_local_cache(finished, local, tmp_path):
    bucket, _ = finished
    assert all_tokens(config(bucket.url, mirror_dir=str(tmp_path / "mirror"))) == all_tokens(local)
    copies = {f"{shard.sha256}.arrayrecord" for shard in load_manifest(f"{bucket.url}/cache/train").shards}
    assert set(os.listdir(tmp_path / "mirror")) == copies


@pytest.mark.parametrize(("bucket", "name"), [("", "none*.jsonl"), ("no-such-", "none.jsonl")])
def test_text_that_does_not_exist_is_a_user_error(store, bucket, name, tmp_path):
    url = store.url.replace("://", f"://{bucket}") + f"/text/{name}"
    for read in (lambda: build_cache(config(tmp_path, train_urls=[url]), "train"), lambda: load_file(url)):
        with pytest.raises(UserError) as caught:
            read()
        assert url in str(caught.value)


def test_a_cache_in_a_missing_bucket_is_a_user_error(emulators, scheme, local):
    wanted = local.model_copy(update={"cache_dir": f"{scheme}://no-such-bucket/cache"})
    with pytest.raises(UserError) as caught:
        build_cache(wanted, "train")
    assert str(caught.value).startswith(f"{wanted.cache_dir}/train/.writable: cannot be written: no such ")
    assert ADVICE[scheme] in str(caught.value)


ACCESSES = [
    lambda url, local: storage.read_bytes(url),
    lambda url, local: storage.list_names(url),
    lambda url, local: storage.file_size(url),
    lambda url, local: storage.upload(__file__, url),
    lambda url, local: storage.download(url, os.devnull),
    lambda url, local: load_file(f"{url}/a"),
    lambda url, local: build_cache(config(".", train_urls=[f"{url}/*.jsonl"]), "train"),
    lambda url, local: build_cache(config(".", tokenizer=f"{url}/a"), "train"),
    lambda url, local: build_cache(local.model_copy(update={"cache_dir": url}), "train"),
]


def test_an_inaccessible_bucket_is_reported_at_once_with_advice_and_not_as_missing_or_corrupt(
    private, local, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for access in ACCESSES:
        with pytest.raises(UserError) as caught:
            access(f"{private}/folder", local)
        assert f"{private}/folder" in str(caught.value)
        assert ADVICE[private[:2]] in str(caught.value).splitlines()[-1]
        assert "delete" not in str(caught.value)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("private", ["s3 without permission"], indirect=True)
def test_the_command_line_reports_an_inaccessible_bucket(private, settings, write_config, run_cli):
    settings["data"]["train_urls"] = [f"{private}/*.jsonl"]
    write_config(settings)
    refused = run_cli("preprocess", "tiny.yaml", code=2)
    assert f"lmtrain: error: {private}/*.jsonl: " in refused.stderr
    assert ADVICE[private[:2]] in refused.stderr


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
