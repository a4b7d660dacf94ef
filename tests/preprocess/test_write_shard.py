"""Build of one shard from one input file."""

import hashlib
import json

import numpy as np
import pytest
import tokenizers
from array_record.python.array_record_module import ArrayRecordReader

from lmtrain.data.config import DataConfig
from lmtrain.preprocess import write_shard as shard
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.write_shard import ShardJob, build_shard

BLOCK = 16384  # part of the file format, which must not change unnoticed


@pytest.fixture
def build(tmp_path, settings):
    """Writes `texts` to a file and builds its shard under `name`; returns its info, its records, and the reports."""

    def run(texts, name="shard"):
        source = tmp_path / "input.jsonl"
        source.write_bytes("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        path = str(tmp_path / name)
        job = ShardJob(
            source=describe_source(str(source)),
            path=path,
            config=DataConfig(tokenizer=settings["data"]["tokenizer"]),
            recipe={"made": "so"},
        )
        reports = []
        info = build_shard(job, lambda *increments: reports.append(increments))
        return info, ArrayRecordReader(f"{path}.arrayrecord").read_all(), reports

    return run


def expected_tokens(texts, settings):
    plain = tokenizers.Tokenizer.from_file(f"{settings['data']['tokenizer']}/tokenizer.json")
    return [[*plain.encode(text, add_special_tokens=False).ids, 0] for text in texts]


TEXTS = [f"the river {i} counts {i * i} windows" for i in range(4100)]


def test_records_are_blocks_of_tokens_with_the_ends_of_their_documents(build, settings, tmp_path):
    info, records, reports = build(TEXTS)
    assert len(reports) > 1
    size = (tmp_path / "input.jsonl").stat().st_size
    assert tuple(map(sum, zip(*reports, strict=True))) == (info.documents, info.tokens, size)
    documents = expected_tokens(TEXTS, settings)
    flat = np.array(sum(documents, []), "<u2")
    blocks = -(-len(flat) // BLOCK)
    assert blocks > 1
    assert len(records) == blocks
    ends = np.cumsum([len(document) for document in documents])
    for block, record in enumerate(records):
        tokens = flat[block * BLOCK : (block + 1) * BLOCK]
        inside = ends[(ends > block * BLOCK) & (ends <= (block + 1) * BLOCK)] - block * BLOCK
        assert record == tokens.tobytes() + inside.astype("<u2").tobytes()
    assert (info.tokens, info.documents) == (len(flat), len(TEXTS))


def test_a_shard_that_fills_its_blocks_exactly_has_no_empty_record(build):
    info, records, _ = build(["\x00" * (BLOCK - 1)])
    assert (info.tokens, len(records)) == (BLOCK, 1)


@pytest.mark.parametrize("texts", [[], [""]], ids=["empty file", "empty document"])
def test_empty_input_gives_a_shard(build, texts):
    info, records, _ = build(texts)
    assert (info.documents, info.tokens) == (len(texts), len(texts))
    assert len(records) == len(texts)
    assert len(info.warnings) == 1


def test_another_build_with_other_limits_of_batches_gives_the_same_bytes(build, tmp_path, monkeypatch):
    build(TEXTS, "one")
    monkeypatch.setattr(shard, "_BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(shard, "_BATCH_CHARACTERS", 100)
    build(TEXTS, "two")
    assert (tmp_path / "one.arrayrecord").read_bytes() == (tmp_path / "two.arrayrecord").read_bytes()


def test_the_marker_describes_the_shard_and_its_recipe(build, tmp_path):
    info, _, _ = build(TEXTS[:10])
    content = (tmp_path / "shard.arrayrecord").read_bytes()
    assert (info.bytes, info.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert info.source["url"] == str(tmp_path / "input.jsonl")
    assert json.loads((tmp_path / "shard.json").read_text()) == {"recipe": {"made": "so"}, "shard": info.described}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.jsonl", "shard.arrayrecord", "shard.json"]
