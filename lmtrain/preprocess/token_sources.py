"""Files of token ids as sources that are read in place, the layouts by which they are recognized, and their documents.

.bin with an .idx next to it   Megatron-LM's IndexedDataset; datatrove writes it, too
.bin with a header             llm.c and modded-nanogpt; an EOS token begins each document
.bin without one, .ds          nanoGPT, datatrove: ids only; an EOS token ends each document
.npy                           OLMo: ids only, or an array as numpy saves it
a folder with a manifest.json  a token cache of lmtrain
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lmtrain.data.cache_manifest import CacheManifest, ShardInfo, Shards, load_manifest, manifest_path, shard_path
from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TokensFormat, TooLong
from lmtrain.data.token_file import TokenLayout, check_index, read_index, sample_checksum
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.recipe import token_dtype
from lmtrain.preprocess.records import TokenizedText
from lmtrain.preprocess.token_types import LLM_C_BYTES, NUMPY, check_content, read_llm_c, read_numpy
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import redact
from lmtrain.runtime.remote import without_query
from lmtrain.runtime.storage import file_size, is_url, read_range

EXTENSIONS = (".bin", ".ds", ".npy")

# Types of `TokensFormat`.
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

# Enough for every header but large ones of numpy.
_START_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """A file that is read in place. `info` is what the cache's manifest says of it: its source has a `fingerprint` of
    parts of the file and its index, and when it was `modified` in ns, None for one at a URL."""

    url: str
    bytes: int
    info: ShardInfo
    has_eos: bool = True  # in the parts that were read, if documents are divided by EOS tokens

    @property
    def label(self) -> str:
        return redact(self.url)

    @property
    def recorded(self) -> dict[str, Any]:
        return self.info.source

    def check_index(self) -> None:
        """Raise `UserError` if its index is corrupt. Reads all of it, which is done once, before there is a cache."""
        if self.info.layout is not None and (index := TokenLayout.of(self.info.layout).index) is not None:
            item_bytes = np.dtype(self.info.layout["dtype"]).itemsize
            check_index(index, partial(read_range, index.file), item_bytes, self.bytes)


def is_in_place(url: str) -> bool:
    """Whether a source of token ids is read in place, and not converted."""
    return os.path.splitext(without_query(url))[1] in EXTENSIONS


def is_cache(url: str) -> bool:
    """Whether this is the folder of a finished token cache."""
    if is_url(url) and os.path.splitext(without_query(url))[1]:
        return False
    return file_size(manifest_path(url)) is not None


def find_layout(url: str, config: DataConfig, tokenizer: Tokenizer) -> TokenSource:
    """A file of token ids as a source. Raises `UserError` if it is damaged, or none that is known."""
    modified = None if is_url(url) else os.stat(url).st_mtime_ns  # before it is read
    size = _size(url)
    sample: dict[int, bytes] = {}

    def read(start: int, end: int) -> bytes:
        sample[start] = read_range(url, start, end)
        return sample[start]

    own, ids = config.format, tokenizer.vocab_size
    assert isinstance(own, TokensFormat)
    start = read_range(url, 0, _START_BYTES)
    index_url = _index_of(url)
    eos = own.eos_id if own.eos_id is not None else tokenizer.eos_id
    if eos is not None and eos >= ids:
        raise UserError(f"data.format.eos_id: {eos} is not below the vocabulary size of {ids:,}")
    layout = TokenLayout(dtype="", offset=0, tokens=0, vocab_size=ids, eos=eos, eos_at=own.eos_at or "last")
    checksum = sample_checksum(size, read)
    documents = None
    if index_url is not None:
        layout = _megatron(url, index_url, size, replace(layout, eos=None))
        assert layout.index is not None
        documents = layout.index.entries - 1
    elif (dtype := read_llm_c(url, start)) is not None:
        tokens = int.from_bytes(start[8:12], "little")
        layout = replace(layout, dtype=dtype, offset=LLM_C_BYTES, tokens=tokens, eos_at=own.eos_at or "first")
        if size != layout.offset + tokens * np.dtype(dtype).itemsize:
            raise UserError(
                f"{url}: truncated, or damaged: its header has {tokens:,} tokens of {np.dtype(dtype).itemsize} bytes, "
                f"but the file has {size:,} bytes"
            )
    elif start.startswith(NUMPY):
        dtype, offset, tokens = read_numpy(
            url, size, lambda first, end: start[first:end] if end <= len(start) else read_range(url, first, end)
        )
        layout = replace(layout, dtype=dtype, offset=offset, tokens=tokens)
    else:
        if not size:
            raise UserError(f"{url}: is empty; write it again, or remove it from the list")
        dtype = _DTYPES[own.dtype or "uint16"]
        check_content(url, size, sample, dtype, ids)
        width = np.dtype(dtype).itemsize
        if size % width:
            raise UserError(
                f"{url}: its {size:,} bytes are no multiple of {width}: truncated, or not {own.dtype or 'uint16'}"
            )
        if own.dtype is None and ids > 65536:
            raise UserError(
                f"{url}: has no header, and 2 bytes per token cannot hold the {ids:,} tokens of the tokenizer "
                f"{tokenizer.path!r}; set data.format.dtype: uint32, or to uint16 if that is what the file has"
            )
        layout = replace(layout, dtype=dtype, tokens=size // width)
    if own.dtype is not None and layout.dtype != _DTYPES[own.dtype]:
        has = np.dtype(layout.dtype).name
        raise UserError(f"{url}: has ids of type {has}, as its header or index says; remove data.format.dtype")
    if layout.index is None and layout.eos is None and (config.mask_across_documents or config.has_positions):
        raise UserError(
            f"{url}: where its documents end is unknown, since the tokenizer {tokenizer.path!r} has no EOS token; set "
            "data.format.eos_id to the id between documents, or data.mask_across_documents: false"
        )
    fingerprint = checksum[:16] + (layout.index.checksum[:16] if layout.index else "")
    source = {"url": redact(url), "bytes": size, "fingerprint": fingerprint, "modified": modified}
    described = asdict(layout)
    file = url if is_url(url) else os.path.realpath(url)
    info = ShardInfo(
        file=file,
        source=source,
        bytes=size,
        sha256=checksum,
        tokens=layout.tokens,
        documents=documents,
        layout=described,
    )
    return TokenSource(url=url, bytes=size, info=info, has_eos=_has_eos(sample, layout))


def _has_eos(sample: Mapping[int, bytes], layout: TokenLayout) -> bool:
    """Whether an EOS token is in these parts of a file, or none is needed."""
    if layout.index is not None or layout.eos is None or not layout.tokens:
        return True
    dtype = np.dtype(layout.dtype)
    for start, part in sample.items():
        begin = max(layout.offset - start, 0)
        begin += (layout.offset - start - begin) % dtype.itemsize
        count = max(len(part) - begin, 0) // dtype.itemsize
        if count and (np.frombuffer(part, dtype, count, begin) == layout.eos).any():
            return True
    return False


def warn_of_settings(config: DataConfig, sources: Sequence[object]) -> None:
    """Log settings of `TokensFormat` that have no effect on the sources of a split, or seem to be wrong."""
    own = config.format
    assert isinstance(own, TokensFormat)
    files = [s for s in sources if isinstance(s, TokenSource) and s.info.layout is not None]
    by_eos = [source for source in files if source.info.layout and source.info.layout["index"] is None]
    if own.dtype is not None and not files:
        log.warning("data.format.dtype: has no effect, since there is no .bin or .npy")
    for name, value in (("eos_id", own.eos_id), ("eos_at", own.eos_at)):
        if value is not None and not by_eos:
            log.warning(f"data.format.{name}: has no effect, since indices or rows say where documents begin")
    if own.input_ids_field != TokensFormat().input_ids_field and all(
        isinstance(source, TokenSource) for source in sources
    ):
        log.warning("data.format.input_ids_field: has no effect, since there are no rows of token ids")
    without = [source.label for source in by_eos if not source.has_eos]
    if without and (config.mask_across_documents or config.has_positions):
        more = f" and {len(without) - 1:,} more" if len(without) > 1 else ""
        log.warning(
            f"{without[0]}{more}: the EOS token is not in the parts that were sampled, so documents may not be "
            "divided; set data.format.eos_id to the id between documents, or data.mask_across_documents: false. A .bin "
            "of Megatron-LM needs its .idx next to it"
        )


def find_shards(folder: str, tokenizer: Tokenizer) -> list[TokenSource]:
    """The shards of another cache as sources. Raises `UserError` if there is none, or it has other tokens."""
    manifest = load_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder}: no manifest.json, so not a finished token cache")
    if manifest.recipe["tokenizer"] != tokenizer.identity:
        raise UserError(f"{folder}: a cache of another tokenizer than data.tokenizer {tokenizer.path!r}")
    return [_shard_source(folder, manifest, info) for info in manifest.shards]


def _shard_source(folder: str, manifest: CacheManifest, info: ShardInfo) -> TokenSource:
    if info.in_place:
        raise UserError(f"{folder}: itself a cache of files that are read in place; set these as train_urls")
    path = shard_path(folder, info)
    source = {"url": redact(path), "bytes": info.bytes, "fingerprint": info.sha256[:16], "modified": None}
    described = replace(info, file=path if is_url(path) else os.path.realpath(path), source=source)
    return TokenSource(url=path, bytes=info.bytes, info=replace(described, dtype=manifest.dtype))


def _size(url: str) -> int:
    size = file_size(url)
    if size is None:
        raise UserError(f"{url}: no such file")
    return size


def _index_of(url: str) -> str | None:
    """The .idx next to a .bin, or next to the file that it links to; None if there is none."""
    for name in (url,) if is_url(url) else (url, os.path.realpath(url)):
        stem, extension = os.path.splitext(name)
        if extension == ".bin" and file_size(f"{stem}.idx") is not None:
            return f"{stem}.idx"
    return None


def _megatron(url: str, index_url: str, size: int, layout: TokenLayout) -> TokenLayout:
    index_size, read = _size(index_url), partial(read_range, index_url)
    modified = None if is_url(index_url) else os.stat(index_url).st_mtime_ns
    dtype, index = read_index(index_url, index_size, read, url, size)
    index = replace(
        index,
        file=index_url if is_url(index_url) else os.path.realpath(index_url),
        checksum=sample_checksum(index_size, read),
        modified=modified,
    )
    return replace(layout, dtype=dtype.str, tokens=size // dtype.itemsize, index=index)


# Tokens that are read at once.
_READ_TOKENS = 1 << 16


class PlacedDocument(NamedTuple):
    """A document, and its file with the number of its first token."""

    place: str
    tokens: TokenizedText


def documents_in_place(source: TokenSource, config: DataConfig, vocab_size: int) -> Iterator[PlacedDocument]:
    """The documents of a file, as its layout divides it. Raises `UserError` if its index is corrupt."""
    source.check_index()
    shards, dtype = Shards.of_one(source.info), token_dtype(vocab_size).str
    too_long: TooLong | None = None if source.info.targets is None else "cut"
    store = open_store(
        config, Cache(folder=config.cache_dir, recipe={}, sources=[], dtype=dtype, shards=shards, too_long=too_long)
    )

    def document(ids: np.ndarray, targets: np.ndarray) -> PlacedDocument:
        tokens = TokenizedText(ids, None if too_long is None else targets)
        return PlacedDocument(f"{source.label}, token {begin:,}", tokens)

    begin, ids, targets = 0, np.zeros(0, np.int32), np.zeros(0, bool)
    for start in range(0, source.info.tokens, _READ_TOKENS):
        read = store.read(np.array([start]), min(_READ_TOKENS, source.info.tokens - start))
        more, begins, are_targets = (part[0] for part in read)
        ids, targets = np.append(ids, more), np.append(targets, are_targets)
        for border in [start + at for at in np.flatnonzero(begins).tolist() if start + at > begin]:
            size = border - begin
            yield document(ids[:size], targets[:size])
            ids, targets, begin = ids[size:], targets[size:], border
    if len(ids):
        yield document(ids, targets)
