"""Random access to a cache gives the same tokens as one long array; threads that cannot be started are an error."""

import os
import shutil
import threading

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from lmtrain.data import token_store
from lmtrain.data.cache_manifest import BLOCK_TOKENS, CacheManifest, ShardInfo, Shards
from lmtrain.data.token_store import TokenStore, document_starts, read_columns
from lmtrain.preprocess import write_shard
from lmtrain.runtime.errors import ReadError, UserError

# tokens in each shard: empty ones first, in the middle and last, one of exactly a block, one of several
SIZES = [0, 5, BLOCK_TOKENS, 0, 0, 2 * BLOCK_TOKENS + 7, 1, 0]


def write(folder, targets=None):
    """-> the folder, its manifest, all tokens as one array, and a bool array that is true at document starts."""
    targets = np.zeros(0, bool) if targets is None else targets
    rng = np.random.default_rng(0)
    everything = rng.integers(0, 60_000, sum(SIZES)).astype("<u2")
    begins = np.zeros(len(everything) + 1, bool)
    shards, start = [], 0
    for number, size in enumerate(SIZES):
        file = f"shard-{number}.arrayrecord"
        writer = ArrayRecordWriter(str(folder / file), "group_size:1,uncompressed")
        tokens = everything[start : start + size]
        ends = np.unique(np.append(rng.integers(1, size + 1, size // 5000), [size, BLOCK_TOKENS])) if size else []
        ends = np.array([end for end in ends if end <= size], int)
        begins[start + ends] = True
        for begin in range(0, size, BLOCK_TOKENS):
            inside = ends[(ends > begin) & (ends <= begin + BLOCK_TOKENS)] - begin
            bits = np.packbits(targets[start:][begin : min(begin + BLOCK_TOKENS, size)], bitorder="little")
            writer.write(
                tokens[begin : begin + BLOCK_TOKENS].tobytes() + inside.astype("<u2").tobytes() + bits.tobytes()
            )
        writer.close()
        shards.append(
            ShardInfo(file=file, source={}, bytes=os.path.getsize(folder / file), sha256="", tokens=size, documents=1)
        )
        start += size
    return folder, CacheManifest(split="train", recipe={}, urls=[], dtype="<u2", shards=shards), everything, begins[:-1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write(tmp_path_factory.mktemp("cache"))


def open_store(folder, manifest, **more):
    return TokenStore(str(folder), Shards.of(manifest), manifest.dtype, lambda info: str(folder / info.file), **more)


@pytest.mark.parametrize("with_targets", [False, True])
def test_windows_anywhere_equal_the_long_array(tmp_path, with_targets):
    rng = np.random.default_rng(1)
    targets = rng.random(sum(SIZES)) < 0.5 if with_targets else None
    folder, manifest, everything, begins = write(tmp_path, targets)
    store = open_store(folder, manifest, too_long="cut" if with_targets else None)
    expected = np.ones(sum(SIZES), bool) if targets is None else targets
    for length in (1, 7, 1000, BLOCK_TOKENS + 3):
        starts = np.append(rng.integers(0, len(everything) - length, 30), [0, len(everything) - length])
        tokens, first, is_target = store.read(starts, length)
        assert (tokens.dtype, first.dtype) == (np.int32, bool)
        for row, start in enumerate(starts):
            np.testing.assert_array_equal(tokens[row], everything[start : start + length])
            np.testing.assert_array_equal(first[row, 1:], begins[start + 1 : start + length])
            np.testing.assert_array_equal(is_target[row], expected[start : start + length])


def test_starts_of_documents_are_found_many_blocks_before(cache):
    folder, manifest, everything, begins = cache
    store, length = open_store(folder, manifest), len(everything) - 5
    starts = np.array([0, 1, 5])

    def begins_of(rows, columns):
        return read_columns(store, starts[rows], columns)[1]

    everywhere = np.arange(3)
    expected = document_starts(begins_of, begins_of(everywhere, range(length)), 0)
    for row, start in enumerate(starts):
        of_row = np.where(begins[start : start + length], np.arange(length), 0)
        np.testing.assert_array_equal(expected[row], np.maximum.accumulate(np.append(0, of_row[1:])))
    for first in (1, 9, BLOCK_TOKENS, length - 1, *np.flatnonzero(begins[5:-1]).tolist()):
        if first:
            columns = range(first, min(first + 3, length))
            found = document_starts(begins_of, begins_of(everywhere, columns), first)
            np.testing.assert_array_equal(found, expected[:, first : columns.stop])


def test_tokens_past_the_end_are_zeros(cache):
    folder, manifest, everything, begins = cache
    total = len(everything)
    found, documents, _ = open_store(folder, manifest).read(np.array([total - 3, total, total + 10]), 5)
    np.testing.assert_array_equal(documents[0, 1:], [*begins[-2:], True, False])
    np.testing.assert_array_equal(found[0], [*everything[-3:], 0, 0])
    assert not found[1:].any()


def test_more_shards_than_open_readers(cache, monkeypatch):
    folder, manifest, everything, _ = cache
    monkeypatch.setattr(token_store, "_OPEN_READERS", 1)
    store = open_store(folder, manifest)
    for _ in range(3):
        np.testing.assert_array_equal(store.read(np.array([0]), len(everything))[0][0], everything)


def test_a_flipped_bit_is_an_error_that_names_the_file(cache, tmp_path):
    folder, manifest, *_ = cache
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    victim = tmp_path / "shard-5.arrayrecord"
    content = bytearray(victim.read_bytes())
    content[40_000] ^= 1
    victim.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-5\.arrayrecord cannot be read: .*shard-5\.\*"):
        open_store(tmp_path, manifest).read(np.array([0]), sum(SIZES))


@pytest.mark.parametrize("action", ["read", "write"])
def test_too_little_memory_for_threads_is_an_error_that_names_it(cache, monkeypatch, tmp_path, action):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    token_store.check_threads.cache_clear()
    read = lambda: open_store(*cache[:2]).read(np.array([0]), 4)  # noqa: E731
    with pytest.raises(ReadError, match="64 threads"):
        read() if action == "read" else write_shard._written(str(tmp_path / "shard")).__enter__()
