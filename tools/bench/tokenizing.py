"""Speed of `lmtrain preprocess` compared with the bare tokenizer on the same text, with all cores and with one.

    .venv/bin/python tools/bench/tokenizing.py [COPIES]

The text is the demo corpus, repeated COPIES times (default 4), in the same number of files. The peer is one call of the
`tokenizers` library's `encode_batch`, on text in memory, in a separate process with the same number of threads; lmtrain
reads, decompresses, parses, tokenizes, packs, checksums and writes. They alternate in one run. Each lmtrain time
includes starting its worker processes. The peer's figures show the speed-up of a second core on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from statistics import median

import tokenizers

from lmtrain.data.config import DataConfig
from lmtrain.preprocess.documents import read_texts
from lmtrain.preprocess.executor import choose_executor, usable_cores
from lmtrain.preprocess.input_files import expand_urls
from lmtrain.preprocess.prepare import Build, wait
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.logging import ALONE, start_console_log

ROUNDS = 3


def main() -> None:
    if sys.argv[1:2] == ["--raw"]:
        encode(*sys.argv[2:])
        return
    copies = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    start_console_log()
    with tempfile.TemporaryDirectory() as folder:
        demo = DataConfig(demo=os.path.join(folder, "demo"))
        prepare_demo(demo)
        for file in expand_urls(demo.urls("train")):
            for copy in range(1, copies):
                shutil.copyfile(file, file.replace("train.", f"train.copy{copy}."))
        config = DataConfig(
            train_urls=[os.path.join(folder, "demo", "train.*.jsonl.gz")],
            tokenizer=demo.tokenizer,
            cache_dir=os.path.join(folder, "cache"),
        )
        ways = sorted({usable_cores(), 1}, reverse=True)
        ours: dict[int, list[float]] = {cores: [] for cores in ways}
        peer: dict[int, list[float]] = {cores: [] for cores in ways}
        for _ in range(ROUNDS):
            for cores in ways:
                peer[cores].append(raw_rate(config, cores))
                began = time.perf_counter()
                cache = find_cache(config, "train")
                wait(Build([cache], choose_executor(RayConfig(), cores, ALONE)).start())
                ours[cores].append(cache.shards.tokens / (time.perf_counter() - began))
                shutil.rmtree(config.cache_dir)
    print(f"{cache.shards.tokens / 1e6:.1f} M tokens")
    for cores in ways:
        mine, theirs = median(ours[cores]), median(peer[cores])
        print(f"{cores} cores: lmtrain {mine:,.0f} tokens/s, encode_batch {theirs:,.0f}: {mine / theirs:.2f} x")


def raw_rate(config: DataConfig, threads: int) -> float:
    """The peer's tokens per second."""
    command = [sys.executable, __file__, "--raw", config.tokenizer, *expand_urls(config.urls("train"))]
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    return float(json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout))


def encode(tokenizer: str, *files: str) -> None:
    texts = [text for file in files for text in read_texts(file, "text")]
    raw = tokenizers.Tokenizer.from_file(os.path.join(tokenizer, "tokenizer.json"))
    began = time.perf_counter()
    encodings = raw.encode_batch(texts)
    seconds = time.perf_counter() - began
    print(json.dumps(sum(len(encoding.ids) for encoding in encodings) / seconds))


if __name__ == "__main__":
    main()
