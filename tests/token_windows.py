"""The windows that a model reads of token ids, and by definition of their documents."""

import numpy as np
import pyarrow
from cache_building import open_built
from pyarrow import parquet
from token_files import EOS, begun, ended

from lmtrain.data.config import DataConfig
from lmtrain.data.windows import windows_of

SEQ_LEN = 50


def config(*urls, cache_dir="cache", tokenizer="byte", **changes):
    format = {"type": "tokens", **changes.pop("format", {})}
    settings = {"num_preprocess_workers": 1, "cache_dir": cache_dir, "format": format, **changes}
    return DataConfig(train_urls=list(urls), tokenizer=tokenizer, **settings)


def windows(wanted):
    """Tokens, starts of documents, 0 in padding, and loss masks of all windows."""
    found = windows_of(open_built(wanted), SEQ_LEN)
    tokens, firsts, mask = found.read(np.arange(found.for_evaluation()), range(SEQ_LEN))
    firsts.reshape(-1)[found.store.shards.tokens :] = 0
    return tokens, firsts, mask


def expected(docs, eos_first=False):
    """The windows of documents by definition."""
    ids = begun(docs) if eos_first else ended(docs)
    starts = np.cumsum([0, *(len(document) + 1 for document in docs)])
    count = -(-len(ids) // SEQ_LEN)
    tokens = np.zeros(count * SEQ_LEN, np.int32)
    tokens[: len(ids)] = ids
    begins = np.searchsorted(starts, np.arange(count * SEQ_LEN), side="right") - 1
    firsts = np.maximum(starts[begins].reshape(count, SEQ_LEN) - SEQ_LEN * np.arange(count)[:, None], 0)
    mask = np.arange(1, count * SEQ_LEN + 1).reshape(count, SEQ_LEN) < len(ids)
    mask[:, -1] = False
    firsts.reshape(-1)[len(ids) :] = 0
    return tokens.reshape(count, SEQ_LEN), firsts, mask


def assert_same(found, wanted):
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, right)


def rows(docs, **more):
    table = pyarrow.table({"input_ids": [np.append(ids, EOS).tolist() for ids in docs], **more})
    parquet.write_table(table, "rows.parquet")
    with pyarrow.OSFile("rows.arrow", "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with pyarrow.OSFile("stream.arrow", "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with open("rows.jsonl", "w") as file:
        file.writelines(f"{row}\n".replace("'", '"').replace("None", "null") for row in table.to_pylist())
