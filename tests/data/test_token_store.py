"""Random access to a cache gives what one long array would."""

import os

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from lmtrain.config.errors import UserError
from lmtrain.data import token_store
from lmtrain.data.manifest import BLOCK_TOKENS, Manifest, ShardInfo
from lmtrain.data.token_store import TokenStore

# tokens in each shard: empty ones first, in the middle and last, one of exactly a block, one of several
SIZES = [0, 5, BLOCK_TOKENS, 0, 0, 2 * BLOCK_TOKENS + 7, 1, 0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder, its manifest, and all tokens as one array."""
    folder = tmp_path_factory.mktemp("cache")
    everything = np.random.default_rng(0).integers(0, 60_000, sum(SIZES)).astype("<u2")
    shards, start = [], 0
    for number, size in enumerate(SIZES):
        file = f"shard-{number}.arrayrecord"
        writer = ArrayRecordWriter(str(folder / file), "group_size:1,uncompressed")
        tokens = everything[start : start + size]
        for begin in range(0, size, BLOCK_TOKENS):
            writer.write(tokens[begin : begin + BLOCK_TOKENS].tobytes())
        writer.write(np.array([size], "<u8").tobytes())  # the end of a document, which is no token
        writer.close()
        blocks = -(-size // BLOCK_TOKENS)
        shards.append(ShardInfo(file, {}, os.path.getsize(folder / file), "", size, 1, blocks))
        start += size
    return folder, Manifest("train", {}, [], "<u2", shards), everything


def test_windows_anywhere_equal_the_long_array(cache):
    folder, manifest, everything = cache
    rng = np.random.default_rng(1)
    for length in (1, 7, 1000, BLOCK_TOKENS + 3):
        starts = np.append(rng.integers(0, len(everything) - length, 40), [0, len(everything) - length])
        found = TokenStore(str(folder), manifest).read(starts, length)
        assert found.dtype == np.int32
        for row, start in zip(found, starts, strict=True):
            np.testing.assert_array_equal(row, everything[start : start + length])


def test_past_the_end_there_are_zeros(cache):
    folder, manifest, everything = cache
    total = len(everything)
    found = TokenStore(str(folder), manifest).read(np.array([total - 3, total, total + 10]), 5)
    np.testing.assert_array_equal(found[0], [*everything[-3:], 0, 0])
    assert not found[1:].any()


def test_more_shards_than_open_readers(cache, monkeypatch):
    folder, manifest, everything = cache
    monkeypatch.setattr(token_store, "_OPEN_READERS", 1)
    store = TokenStore(str(folder), manifest)
    for _ in range(3):
        np.testing.assert_array_equal(store.read(np.array([0]), len(everything))[0], everything)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_shard_is_named(cache, tmp_path, damage):
    folder, manifest, _ = cache
    for shard in manifest.shards:
        (tmp_path / shard.file).write_bytes((folder / shard.file).read_bytes())
    TokenStore(str(tmp_path), manifest).check_files()
    victim = tmp_path / "shard-2.arrayrecord"
    if damage == "missing":
        victim.unlink()
    else:
        os.truncate(victim, 1000)
    with pytest.raises(UserError, match=r"shard-2\.arrayrecord (is missing|has 1,000 bytes instead)"):
        TokenStore(str(tmp_path), manifest).check_files()
