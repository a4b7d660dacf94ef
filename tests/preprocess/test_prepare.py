"""Builds of caches: from files of each format, resumed, stopped by bad records, and of a run with several processes."""

import importlib.util
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from cache_building import build_cache, open_built
from preprocess.conftest import NAMES, config, contents, lines, mtimes

from lmtrain.data.cache_manifest import Shards, load_manifest
from lmtrain.data.config import DataConfig
from lmtrain.data.token_store import TokenStore
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess import prepare
from lmtrain.preprocess.executor import LOCAL
from lmtrain.preprocess.prepare import SplitCaches, find_caches, shared_text, start_build
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes


def test_the_cache_has_the_tokens_of_all_files_in_order(work, cache):
    manifest = load_manifest(str(cache))
    tokenizer = load_tokenizer("tok")
    documents = [json.loads(line)["text"] for name in NAMES for line in (work / name).read_text().splitlines()]
    expected = [i for text in documents for i in [*tokenizer.backend.encode(text).ids, tokenizer.eos_id]]
    assert (manifest.documents, manifest.tokens) == (343, len(expected))
    store = TokenStore("train", Shards.of(manifest), manifest.dtype, lambda info: str(cache / info.file))
    assert store.read(np.array([0]), len(expected))[0][0].tolist() == expected


def test_two_workers_give_the_bytes_of_one(work, finished):
    build_cache(config(num_preprocess_workers=2), "train")
    assert contents(work / "cache" / "train") == contents(finished)


def test_only_missing_shards_are_built_and_a_finished_cache_is_not_modified(cache, finished):
    for name in ("manifest.json", "shard-00001-of-00003.json"):
        (cache / name).unlink()
    (cache / "shard-00002-of-00003.arrayrecord.tmp-1").write_bytes(b"left by a killed worker")
    before = mtimes(cache)
    build_cache(config(), "train")
    assert contents(cache) == contents(finished)
    kept = [name for name in contents(finished) if name != "manifest.json" and not name.startswith("shard-00001")]
    assert {name: mtimes(cache)[cache / name] for name in kept} == {name: before[cache / name] for name in kept}
    before = mtimes(cache)
    build_cache(config(), "train")
    assert mtimes(cache) == before


def test_a_bad_line_is_named_and_the_build_resumes_after_a_fix(work, finished):
    good, before = (work / "c.jsonl").read_text(), (work / "c.jsonl").stat()
    (work / "c.jsonl").write_text(good + "not json\n")
    folder = work / "cache" / "train"
    with pytest.raises(UserError, match=r"^c\.jsonl:41: not JSON"):
        build_cache(config(), "train")
    assert not (folder / "manifest.json").exists()
    assert not (folder / "shard-00002-of-00003.json").exists()
    (work / "c.jsonl").write_text(good)
    os.utime(work / "c.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))  # which the manifest has
    build_cache(config(), "train")
    assert contents(folder) == contents(finished)


def test_a_cache_in_the_home_folder_is_found(work, monkeypatch):
    monkeypatch.setenv("HOME", str(work / "home"))
    build_cache(config(cache_dir="~/cache", train_urls=["b.jsonl"]), "train")
    assert (work / "home" / "cache" / "train" / "manifest.json").exists()


def test_skipped_records_are_counted_and_logged_and_change_nothing_else(work, finished, caplog):
    (work / "b.jsonl").write_text("{broken\n" + (work / "b.jsonl").read_text() + '{"txt": 1}\n')
    manifest = build_cache(config(on_bad_record="skip", max_bad_fraction=0.5), "train")
    assert (manifest.skipped, [shard.skipped for shard in manifest.shards]) == (2, [0, 2, 0])
    (warning,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert warning.startswith("preprocess train: skipped 2 bad records\n  b.jsonl:1: not JSON")
    assert "  b.jsonl:5: no key 'text'" in warning
    for shard in manifest.shards:
        assert (work / "cache" / "train" / shard.file).read_bytes() == (finished / shard.file).read_bytes()


def test_too_many_bad_records_are_an_error_that_shows_the_first(work):
    (work / "b.jsonl").write_text("{broken\n" * 50 + lines("a", "b"))
    with pytest.raises(UserError) as caught:
        build_cache(config(on_bad_record="skip", max_bad_fraction=0.9), "train")
    first, *rest = str(caught.value).splitlines()
    assert all(part in first for part in ("b.jsonl: 50", " 52", "data.max_bad_fraction 0.9"))
    assert len(rest) == 10
    assert rest[0].startswith("  b.jsonl:1: not JSON")
    assert load_manifest("cache/train") is None


def test_a_too_long_document_that_cannot_be_split_is_an_error_with_its_location(work):
    tokenizer = json.loads((work / "tok" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (work / "tok" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (work / "b.jsonl").write_text(lines("short", "ü " * 300))
    with pytest.raises(UserError, match=r"b\.jsonl:2: .* 900 bytes .*data\.max_document_bytes 500"):
        build_cache(config(max_document_bytes=500), "train")
    assert build_cache(config(max_document_bytes=900), "train").documents == 342


def test_a_finished_cache_of_a_dataset_is_used_without_opening_the_dataset(work, caplog):
    (work / "data").mkdir()
    for name in NAMES:
        shutil.copyfile(work / name, work / "data" / f"train-{name}")
    settings = {"train_urls": None, "id": str(work / "data"), "stream": True}
    built = build_cache(config(**settings), "train")
    whole = load_manifest("cache/train")
    assert built == whole
    assert [shard.documents for shard in built.shards] == [300, 3, 40]
    assert build_cache(config(**settings), "train") == built
    assert "modified since they were cached" not in caplog.text
    os.utime(work / "data" / "train-b.jsonl", ns=(5, 5))
    assert build_cache(config(**settings), "train") == built
    assert "modified since they were cached" in caplog.text
    (work / "data" / "train-b.jsonl").write_text(lines("other"))
    with pytest.raises(UserError, match=r"data\.id "):
        build_cache(config(**settings), "train")
    shutil.rmtree(work / "data")
    assert build_cache(config(**settings), "train") == built
    with pytest.raises(UserError, match="not found locally"):
        build_cache(config(**settings | {"stream": False}), "train")


def test_a_split_file_has_the_tokens_of_the_unsplit_file(work):
    whole = build_cache(config(train_urls=["a.jsonl"], cache_dir="whole"), "train")
    split = config(train_urls=["a.jsonl"], split_bytes=7000)
    parts = build_cache(split, "train")
    assert (len(whole.shards), len(parts.shards)) == (1, 4)
    assert (parts.tokens, parts.documents) == (whole.tokens, whole.documents)
    with pytest.raises(UserError, match=r"a\.jsonl from byte 7,000 "):
        build_cache(split.model_copy(update={"split_bytes": 10**6}), "train")


def test_passthrough_stores_token_ids_unchanged(work):
    (work / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n{"ids": []}\n{"ids": [69999]}\n')
    settings = {"train_urls": ["ids.jsonl"], "text_key": "ids", "tokenizer": "passthrough", "vocab_size": 70_000}
    manifest = build_cache(config(**settings, enforce_eos=False), "train")
    assert (manifest.tokens, manifest.documents, manifest.dtype) == (4, 3, "<u4")
    stored = open_built(config(**settings, enforce_eos=False)).read(np.array([0]), 4)[0]
    assert stored.tolist() == [[1, 2, 3, 69_999]]
    assert manifest.recipe["tokenizer"] == {"fingerprint": "passthrough", "vocab_size": 70_000}


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


@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_a_fraction_of_the_training_documents_is_held_out_by_their_text(tmp_path, settings, caplog, kind):
    """Each document is in one of the splits, and a document that is there twice is in the same one."""
    texts = [f"text {number % 150}" for number in range(200)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    where = {"train_urls": [f"{tmp_path}/data/train.jsonl"]} if kind == "files" else {"id": f"{tmp_path}/data"}
    data = {"tokenizer": settings["data"]["tokenizer"], "cache_dir": str(tmp_path / "cache"), **where}
    of_split = DataConfig(**data, validation_fraction=0.2)
    find_caches(of_split)
    assert "generalization" not in caplog.text
    found = {}
    for split in ("train", "validation"):
        store, library = open_built(of_split, split), load_tokenizer(data["tokenizer"]).backend
        ids = store.read(np.array([0]), build_cache(of_split, split).shards[0].tokens)[0][0]
        found[split] = library.decode(ids.tolist(), skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert not set(found["train"]) & set(found["validation"])
    assert 10 < len(set(found["validation"])) < 60
    assert DataConfig(**of_split.model_dump()) == of_split  # as a run saves it
    with pytest.raises(UserError, match="validation_fraction"):
        find_caches(DataConfig(**data, validation_fraction=0.3))
    with pytest.raises(ValueError, match="validation_urls"):
        DataConfig(**data, validation_fraction=0.2, validation_urls=["x.jsonl"])


def test_splits_of_a_dataset_have_any_names(tmp_path, settings):
    (tmp_path / "data").mkdir()
    for name in ("train_sft", "test_sft"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train_sft", "test_sft"))
        + "---\n"
    )
    data = {"id": f"{tmp_path}/data", "tokenizer": settings["data"]["tokenizer"], "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"data\.split.*train_sft, test_sft"):
        find_caches(DataConfig(**data))
    assert not find_caches(DataConfig(**data, split="train_sft")).validation
    named = find_caches(DataConfig(**data, split="train_sft", validation_split="test_sft"))
    assert [cache.sources[0]["split"] for cache in named.all] == ["train_sft", "test_sft"]
    with pytest.raises(UserError, match=r"validation_split.*train_sft, test_sft"):
        find_caches(DataConfig(**data, split="train_sft", validation_split="tests"))


def test_all_caches_of_other_data_are_named_at_once_and_can_be_built_again(tmp_path, settings):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name, "body": name * 2}) + "\n")

    def config(key):
        files = {name: {"train_urls": [f"{tmp_path}/{name}.jsonl"], "text_key": key} for name in "ab"}
        tokenizer = settings["data"]["tokenizer"]
        return DataConfig(configs=files, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"))

    for source in config("text").sources().values():
        build_cache(source, "train")
    with pytest.raises(UserError) as refused:
        find_caches(config("body"))
    assert all(f"cache/{name}/train" in str(refused.value) for name in "ab")
    assert str(refused.value).count("--rebuild") == 1
    (tmp_path / "cache" / "b" / "train" / "mine.txt").touch()
    with pytest.raises(UserError, match=r"mine\.txt"):
        find_caches(config("body"), rebuild=True)
    (tmp_path / "cache" / "b" / "train" / "mine.txt").unlink()
    assert not any(cache.complete for cache in find_caches(config("body"), rebuild=True).all)
    assert not any(cache.complete for cache in find_caches(config("text")).all)
