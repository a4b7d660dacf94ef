"""Hugging Face datasets from a local folder: the same shards and documents for every reader."""

import json

import pytest

from lmtrain.data.config import SourceConfig
from lmtrain.preprocess import hf_dataset
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.hf_dataset import DatasetRows, dataset_splits, list_dataset_shards
from lmtrain.preprocess.records import Texts
from lmtrain.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Three training files and one for validation, 5 rows each."""
    for name in ("train-00000", "train-00001", "train-00002", "validation"):
        rows = [json.dumps({"text": f"{name} {row}", "n": row}) for row in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return str(tmp_path)


def texts(config, split):
    return [row["text"] for shard in list_dataset_shards(config, split) for _, row in DatasetRows(shard)]


@pytest.mark.parametrize("stream", [False, True])
def test_rows_are_in_the_order_of_their_files(folder, stream):
    config = SourceConfig(id=folder, stream=stream)
    assert dataset_splits(config) == ["train", "validation"]
    assert texts(config, "train") == [f"train-0000{file} {row}" for file in range(3) for row in range(5)]
    assert texts(config, "validation") == [f"validation {row}" for row in range(5)]


def test_a_stream_has_one_shard_per_file_and_a_table_shards_by_size(folder, monkeypatch):
    assert [shard.count for shard in list_dataset_shards(SourceConfig(id=folder, stream=True), "train")] == [3, 3, 3]
    table = SourceConfig(id=folder)
    assert [shard.count for shard in list_dataset_shards(table, "train")] == [1]
    monkeypatch.setattr(hf_dataset, "_SHARD_BYTES", 100)
    shards = list_dataset_shards(table, "train")
    assert len(shards) > 1
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert texts(table, "train") == [f"train-0000{file} {row}" for file in range(3) for row in range(5)]


def test_the_fingerprint_depends_on_the_rows(folder, tmp_path):
    (before,) = list_dataset_shards(SourceConfig(id=folder), "train")
    hf_dataset._load.cache_clear()
    assert list_dataset_shards(SourceConfig(id=folder), "train") == [before]
    hf_dataset._load.cache_clear()
    (tmp_path / "train-00002.jsonl").write_text(json.dumps({"text": "other", "n": 1}))
    (after,) = list_dataset_shards(SourceConfig(id=folder), "train")
    assert after.fingerprint != before.fingerprint


def test_rows_without_text_are_errors_with_their_location(folder):
    (shard,) = list_dataset_shards(SourceConfig(id=folder), "validation")
    for key, reason in (("n", "'n' is int"), ("body", "no key 'body'")):
        reader = DocumentReader(shard, Texts(key), skip_bad=True)
        assert (list(reader), reader.skipped, reader.position) == ([], 5, shard.bytes)
        assert reader.bad_records[1].startswith(f"dataset {folder} validation:2: {reason}")


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        ({}, "test", "train, validation"),
        ({"name": "other"}, "train", "'other'"),
        ({"id": "/no/such/folder"}, "train", "/no/such/folder"),
        ({"id": "acme/none"}, "train", "HF_TOKEN"),
        ({"id": "acme/none", "stream": True}, "train", "data.id to a local folder"),
    ],
)
def test_an_unavailable_dataset_is_an_error_with_the_reason(folder, change, split, message):
    with pytest.raises(UserError, match=message):
        list_dataset_shards(SourceConfig(**{"id": folder} | change), split)
