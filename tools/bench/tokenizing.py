"""Speed of `lmtrain preprocess` beside the bare tokenizer on the same text, in the same run.

    .venv/bin/python tools/bench/tokenizing.py [COPIES]

The text is the demo corpus, COPIES times over (default 4), in as many files. The peer is one call of the `tokenizers`
library's `encode_batch` with all cores, on text already in memory; lmtrain reads, decompresses, parses, tokenizes,
packs, checksums and writes. They take turns. Each lmtrain time includes starting its worker processes.
"""

import os
import shutil
import sys
import tempfile
import time
from statistics import median

import tokenizers

from lmtrain.data.config import DataConfig
from lmtrain.preprocess.build import build_cache
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.local import usable_cores
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.sources import expand_urls
from lmtrain.runtime.logging import start_console_log

ROUNDS = 3


def main() -> None:
    copies = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    start_console_log()
    with tempfile.TemporaryDirectory() as folder:
        demo = DataConfig(demo=os.path.join(folder, "demo"))
        prepare_demo(demo)
        files = expand_urls(demo.urls("train"))
        texts = [text for file in files for _, text in DocumentReader(file, "text")] * copies
        for copy in range(1, copies):
            for file in files:
                shutil.copyfile(file, file.replace("train.", f"train.copy{copy}."))
        config = DataConfig(
            train_urls=[os.path.join(folder, "demo", "train.*.jsonl.gz")],
            tokenizer=demo.tokenizer,
            cache_dir=os.path.join(folder, "cache"),
        )
        raw = tokenizers.Tokenizer.from_file(os.path.join(demo.tokenizer, "tokenizer.json"))
        ours, peer = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            tokens = sum(len(encoding.ids) for encoding in raw.encode_batch(texts))
            peer.append(tokens / (time.perf_counter() - began))
            began = time.perf_counter()
            manifest = build_cache(config, "train")
            ours.append(manifest.tokens / (time.perf_counter() - began))
            assert manifest.tokens == tokens + len(texts)  # an end-of-text token per document
            shutil.rmtree(config.cache_dir)
    print(f"{sum(map(len, texts)) / 1e6:.0f} M characters, {tokens / 1e6:.1f} M tokens, {usable_cores()} cores")
    print(f"encode_batch        {median(peer):>12,.0f} tokens/s")
    print(f"lmtrain preprocess  {median(ours):>12,.0f} tokens/s  {median(ours) / median(peer):.2f} x encode_batch")


if __name__ == "__main__":
    main()
