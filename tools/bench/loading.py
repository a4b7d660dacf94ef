"""Speed of reading batches from a token cache, compared with reading the same bytes from the page cache.

    .venv/bin/python tools/bench/loading.py [MILLION_TOKENS]

Writes shards of random tokens with documents of 600 tokens on average (default 200 M tokens in 50 shards), then reads
batches of 32 sequences of 1024 tokens in each order, through the Grain pipeline as training does. The floor is one
call of `reader.read` for all blocks that a batch touches, sorted, without processing. At the end, the time to open a
complete cache of 10,000 shards: plan, manifest, sizes of sources and shards.
"""

import os
import sys
import tempfile
import time

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from lmtrain.data.batches import TrainSource, iterate
from lmtrain.data.cache_manifest import BLOCK_TOKENS, CacheManifest, ShardInfo, Shards, save_manifest, shard_name
from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.recipe import recipe_of
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.preprocess.tokenize import TokenBatch
from lmtrain.preprocess.write_shard import _WRITER_OPTIONS, _BlockWriter

SHARDS, SEQ_LEN, BATCH, STEPS = 50, 1024, 32, 600


def main() -> None:
    tokens = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 200_000_000
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_cache(folder, tokens)
        floor = read_blocks(folder, manifest)
        print(f"{tokens / 1e6:.0f} M tokens in {SHARDS} shards, batches of {BATCH} x {SEQ_LEN}")
        print(f"floor, blocks only   {floor / 1e6:8.1f} M tokens/s")
        for name, shuffle in (("in order", False), ("shuffle 16384", 16384), ("shuffle true", True)):
            rate = load(folder, manifest, shuffle)
            print(f"{name:<20} {rate / 1e6:8.1f} M tokens/s  {rate / floor:.2f} x the floor")
    with tempfile.TemporaryDirectory() as folder:
        print(f"opening 10,000 shards {open_many(folder):7.2f} s")


def write_cache(folder: str, tokens: int) -> CacheManifest:
    rng = np.random.default_rng(0)
    infos = []
    for number in range(SHARDS):
        file = f"{shard_name(number, SHARDS)}.arrayrecord"
        writer = ArrayRecordWriter(os.path.join(folder, file), _WRITER_OPTIONS)
        blocks = _BlockWriter(writer, np.dtype("<u2"), has_targets=False)
        ids = rng.integers(0, 50257, tokens // SHARDS).astype("<u2")
        lengths = np.diff(np.append(np.arange(0, len(ids), 600), len(ids)))
        blocks.add(TokenBatch(ids, lengths))
        blocks.finish()
        writer.close()
        infos.append(
            ShardInfo(
                file=file,
                source={},
                bytes=os.path.getsize(os.path.join(folder, file)),
                sha256="",
                tokens=len(ids),
                documents=len(lengths),
            )
        )
    return CacheManifest(split="train", recipe={}, urls=[], dtype="<u2", shards=infos)


def load(folder: str, manifest: CacheManifest, shuffle: bool | int) -> float:
    cache = Cache(folder=folder, recipe={}, sources=[], dtype="<u2", shards=Shards.of(manifest))
    store = open_store(DataConfig(), cache)
    source = TrainSource(
        stores=[store],
        mixture=None,
        seq_len=SEQ_LEN,
        batch_sizes=BatchSizes.of(BATCH),
        rows={BATCH: np.arange(BATCH)},
        num_steps=STEPS + 20,
        shuffle=shuffle,
        seed=0,
        mask_across_documents=True,
    )
    batches = iterate(source)
    for _ in range(20):
        next(batches)
    began = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
    return STEPS * BATCH * SEQ_LEN / (time.perf_counter() - began)


def read_blocks(folder: str, manifest: CacheManifest) -> float:
    """Tokens/s of reading the block around each of as many random windows, one call per shard and batch."""
    readers = [
        ArrayRecordReader(os.path.join(folder, info.file), "readahead_buffer_size:0,max_parallelism:0")
        for info in manifest.shards
    ]
    rng = np.random.default_rng(1)
    blocks = manifest.shards[0].tokens // BLOCK_TOKENS
    began = time.perf_counter()
    for _ in range(STEPS // 4):
        shards, places = rng.integers(0, SHARDS, BATCH), rng.integers(0, blocks, BATCH)
        for shard in np.unique(shards).tolist():
            readers[shard].read(sorted(set(places[shards == shard].tolist())))
    return STEPS // 4 * BATCH * SEQ_LEN / (time.perf_counter() - began)


def open_many(folder: str, count: int = 10_000) -> float:
    texts, cache = os.path.join(folder, "texts"), os.path.join(folder, "cache")
    config = DataConfig(train_urls=[f"{texts}/*.jsonl"], tokenizer="byte", cache_dir=cache)
    os.makedirs(texts)
    os.makedirs(os.path.join(cache, "train"))
    infos = []
    for number in range(count):
        source = os.path.join(texts, f"{number:05d}.jsonl")
        with open(source, "w") as file:
            file.write(f'{{"text": "{number}"}}\n')
        name = shard_name(number, count)
        with open(os.path.join(cache, "train", f"{name}.arrayrecord"), "wb") as file:
            file.write(b"x" * 100)
        described = vars(describe_source(source))
        infos.append(
            ShardInfo(
                file=f"{name}.arrayrecord", source=described, bytes=100, sha256="0" * 64, tokens=1000, documents=10
            )
        )
    recipe = recipe_of(config, open_tokenizer("byte"), None)
    save_manifest(
        os.path.join(cache, "train"),
        CacheManifest(split="train", recipe=recipe, urls=config.urls("train"), dtype="<u2", shards=infos),
    )
    began = time.perf_counter()
    plan = find_cache(config, "train")
    open_store(
        config,
        Cache(folder=plan.folder, recipe=plan.recipe, sources=plan.sources, dtype=plan.dtype, shards=plan.shards),
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
