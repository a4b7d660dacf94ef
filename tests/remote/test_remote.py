"""Text, token caches and configs in buckets, with emulators of Google Cloud Storage and Amazon S3."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import TOKENIZER

from lmtrain.config.errors import UserError
from lmtrain.config.yaml_loader import load_file
from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import DataConfig
from lmtrain.preprocess import build
from lmtrain.preprocess.build import build_cache
from lmtrain.preprocess.executor import Executor
from lmtrain.preprocess.plan import plan_cache
from lmtrain.preprocess.write_shard import build_shard
from lmtrain.runtime import storage

# In the order of the sources below, one shard each; more than the minimum that a mirror keeps.
NAMES = [f"{letter}{number}.jsonl.gz" for letter in "ba" for number in range(5)]
SHARDS = [f"train/shard-{index:05d}-of-00010" for index in range(10)]

ADVICE = {"gs": "gcloud auth application-default login", "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"}


def text_of(name):
    lines = "".join(json.dumps({"text": f"{name} has the line {i}"}) + "\n" for i in range(20 + ord(name[1])))
    return gzip.compress(lines.encode(), mtime=0)


def build_in_this_process(monkeypatch):
    """Build without worker processes, which take seconds to start; test_run.py starts them."""

    def run(jobs, on_counts, stopped):
        return ((number, build_shard(job, lambda *counts: None)) for number, job in enumerate(jobs))

    monkeypatch.setattr(build, "choose_executor", lambda *arguments: Executor("this process", run))


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
    for job in plan_cache(config(root), "train").jobs:
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


@pytest.fixture
def bucket(finished):
    """That bucket; changes by a test are reverted."""
    store, contents = finished
    store.touched.clear()
    yield store
    for name in list(store.touched):
        store.put(name, contents[name])


def open_tokens(wanted):
    """The store of a finished cache, after its mirror has prefetched."""
    plan = plan_cache(wanted, "train")
    opened = open_store(wanted, Cache(plan.folder, plan.recipe, plan.sources, plan.dtype, plan.shards))
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join()
    return opened


def all_tokens(opened):
    return opened.read(np.array([0]), opened.shards.tokens)[0][0].tolist()


def flip_a_byte(content):
    changed = bytearray(content)
    changed[-100] ^= 1
    return bytes(changed)


def test_braces_and_globs_find_the_files_in_order_and_the_shards_equal_those_of_a_local_build(finished, local):
    store, _ = finished
    ours, theirs = load_manifest(f"{store.url}/cache/train"), load_manifest(f"{local.cache_dir}/train")
    assert [shard.source["url"] for shard in ours.shards] == [f"{store.url}/text/{name}" for name in NAMES]
    assert [shard.sha256 for shard in ours.shards] == [shard.sha256 for shard in theirs.shards]


def test_a_cache_in_a_bucket_has_the_files_of_a_local_one(finished, local):
    _, contents = finished
    there = {name.removeprefix("cache/"): content for name, content in contents.items() if name.startswith("cache/")}
    files = [f"{shard}.{extension}" for shard in SHARDS for extension in ("arrayrecord", "json")]
    assert sorted(there) == sorted(["train/manifest.json", *files])
    for shard in SHARDS:
        with open(f"{local.cache_dir}/{shard}.arrayrecord", "rb") as file:
            assert there[f"{shard}.arrayrecord"] == file.read()


def test_a_finished_cache_in_a_bucket_is_not_changed(bucket):
    built = load_manifest(f"{bucket.url}/cache/train")
    for name, content in bucket.contents("cache").items():
        bucket.put(f"cache/{name}", content + b"\n" if name.endswith("json") else b"not read")
    before = bucket.contents("cache")
    assert build_cache(config(bucket.url), "train") == built
    assert bucket.contents("cache") == before


def test_only_missing_shards_of_a_cache_in_a_bucket_are_built_again(bucket, finished):
    complete = dict(finished[1])
    bucket.delete("cache/train/manifest.json", f"cache/{SHARDS[3]}.arrayrecord")
    kept = f"cache/{SHARDS[0]}.json"
    complete[kept] += b"\n"  # still valid; lost if the marker is written again
    bucket.put(kept, complete[kept])
    build_cache(config(bucket.url), "train")
    assert bucket.contents() == complete


def test_a_cache_in_a_bucket_whose_source_text_has_changed_is_refused(bucket):
    bucket.put("text/a0.jsonl.gz", text_of("c0.jsonl.gz"))
    with pytest.raises(UserError, match=r"text/a0\.jsonl\.gz has changed since it was cached"):
        build_cache(config(bucket.url), "train")


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


def test_tokens_read_through_a_mirror_are_those_of_the_local_cache(bucket, local, tmp_path):
    mirrored = open_tokens(config(bucket.url, mirror_dir=str(tmp_path / "mirror")))
    assert all_tokens(mirrored) == all_tokens(open_tokens(local))
    copies = {f"{shard.sha256}.arrayrecord" for shard in mirrored.shards.infos}
    assert set(os.listdir(tmp_path / "mirror")) == copies


def test_mirrored_shards_are_not_fetched_again(bucket, tmp_path):
    wanted = config(bucket.url, mirror_dir=str(tmp_path))
    tokens = all_tokens(open_tokens(wanted))
    bucket.delete(*(f"cache/{shard}.arrayrecord" for shard in SHARDS))
    assert all_tokens(open_tokens(wanted)) == tokens


def test_a_corrupt_shard_in_a_bucket_is_an_error_that_names_it(bucket, tmp_path):
    corrupt = f"cache/{SHARDS[5]}.arrayrecord"
    bucket.put(corrupt, flip_a_byte(bucket.get(corrupt)))
    opened = open_tokens(config(bucket.url, mirror_dir=str(tmp_path)))
    with pytest.raises(UserError) as caught:
        all_tokens(opened)
    assert str(caught.value).startswith(f"{bucket.url}/{corrupt}: checksum mismatch")
    shards = [f"{shard.sha256}.arrayrecord" for shard in opened.shards.infos]
    assert set(os.listdir(tmp_path)) == set(shards[:5])


def test_a_shard_missing_from_a_bucket_is_an_error_that_names_it(bucket, tmp_path):
    bucket.delete(f"cache/{SHARDS[5]}.arrayrecord")
    opened = open_tokens(config(bucket.url, mirror_dir=str(tmp_path)))
    with pytest.raises(UserError, match=f"^{bucket.url}/cache/{SHARDS[5]}.arrayrecord is missing"):
        all_tokens(opened)


def test_a_small_mirror_deletes_the_oldest_copies_and_reads_the_same(bucket, local, tmp_path):
    largest = max(shard.bytes for shard in load_manifest(f"{local.cache_dir}/train").shards)
    small = config(bucket.url, mirror_dir=str(tmp_path), max_mirror_bytes=3 * largest)
    opened = open_tokens(small)
    shards = [f"{shard.sha256}.arrayrecord" for shard in opened.shards.infos]
    assert set(os.listdir(tmp_path)) == set(shards[:3])
    assert all_tokens(opened) == all_tokens(open_tokens(local))
    assert set(os.listdir(tmp_path)) == set(shards[-8:])
    assert all_tokens(open_tokens(small)) == all_tokens(open_tokens(local))


@pytest.mark.parametrize("name", ["none.jsonl", "none*.jsonl"])
def test_a_missing_object_is_a_user_error(store, name):
    url = f"{store.url}/text/{name}"
    with pytest.raises(UserError) as caught:
        build_cache(config(store.url, train_urls=[url]), "train")
    assert str(caught.value) == f"data.train_urls: no such file: {url}"


@pytest.mark.parametrize("name", ["a0.jsonl", "*.jsonl"])
def test_text_in_a_missing_bucket_is_a_user_error(emulators, scheme, name, tmp_path):
    url = f"{scheme}://no-such-bucket/text/{name}"
    with pytest.raises(UserError, match="no such file") as caught:
        build_cache(config(tmp_path, train_urls=[url]), "train")
    assert url in str(caught.value)


def test_a_cache_in_a_missing_bucket_is_a_user_error(emulators, scheme, local):
    wanted = local.model_copy(update={"cache_dir": f"{scheme}://no-such-bucket/cache"})
    with pytest.raises(UserError) as caught:
        build_cache(wanted, "train")
    assert str(caught.value).startswith(f"{wanted.cache_dir}/train/.writable: cannot be written: no such ")
    assert ADVICE[scheme] in str(caught.value)


ACCESSES = [
    storage.read_bytes,
    storage.list_names,
    storage.file_size,
    lambda url: storage.write_bytes(url, b"x"),
    lambda url: storage.upload(__file__, url),
    lambda url: storage.download(url, os.devnull),
    lambda url: build_cache(config("unused", train_urls=[f"{url}/*.jsonl"]), "train"),
]


def test_an_inaccessible_bucket_is_reported_at_once_with_advice_and_no_traceback(
    private, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for do in ACCESSES:
        started = time.monotonic()
        with pytest.raises(UserError) as caught:
            do(f"{private}/folder")
        assert time.monotonic() - started < 10
        first, second = str(caught.value).splitlines()
        assert first.startswith(f"{private}/folder")
        assert ": cannot be " in first
        assert ADVICE[private[:2]] in second
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "private",
    [
        *(pytest.param(f"{store} without credentials", marks=pytest.mark.long) for store in ("gs", "s3")),
        "s3 without permission",
    ],
    indirect=True,
)
def test_the_command_line_reports_an_inaccessible_bucket_in_seconds(private, settings, write_config, tmp_path):
    settings["data"]["train_urls"] = [f"{private}/*.jsonl"]
    write_config(settings)
    started = time.monotonic()
    command = [sys.executable, "-m", "lmtrain", "preprocess", "tiny.yaml"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert time.monotonic() - started < 30
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"lmtrain: error: {private}/*.jsonl: cannot be read: ")
    assert ADVICE[private[:2]] in refused.stderr


def test_a_file_in_an_inaccessible_bucket_is_not_reported_as_missing(private, tmp_path):
    with pytest.raises(UserError) as caught:
        build_cache(config(tmp_path, train_urls=[f"{private}/a.jsonl"]), "train")
    assert str(caught.value).startswith(f"{private}/a.jsonl: cannot be read: ")
    assert ADVICE[private[:2]] in str(caught.value)


def test_an_inaccessible_cache_is_not_reported_as_corrupt(private, local):
    with pytest.raises(UserError) as caught:
        build_cache(local.model_copy(update={"cache_dir": f"{private}/cache"}), "train")
    assert str(caught.value).startswith(f"{private}/cache/train/manifest.json: cannot be read: ")
    assert "delete" not in str(caught.value)


def test_a_config_in_an_inaccessible_bucket_is_reported_with_advice(private):
    with pytest.raises(UserError) as caught:
        load_file(f"{private}/tiny.yaml")
    assert str(caught.value).startswith(f"{private}/tiny.yaml: cannot be read: ")
    assert ADVICE[private[:2]] in str(caught.value)


def test_a_tokenizer_in_an_inaccessible_bucket_is_reported_with_advice(private, tmp_path):
    with pytest.raises(UserError) as caught:
        build_cache(config(tmp_path, tokenizer=f"{private}/tokenizer"), "train")
    assert f"{private}/tokenizer" in str(caught.value)
    assert ADVICE[private[:2]] in str(caught.value)


@pytest.mark.parametrize("bucket", ["", "no-such-"])
def test_a_missing_config_in_a_bucket_is_a_user_error(store, bucket):
    url = store.url.replace("://", f"://{bucket}") + "/tiny.yaml"
    with pytest.raises(UserError, match=f"^{url}: (no such file|cannot be read: .* does not exist)$"):
        load_file(url)
