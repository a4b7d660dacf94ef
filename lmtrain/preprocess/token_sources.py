"""Files of token ids as sources that are read in place, and the layouts by which they are recognized.

.bin with an .idx next to it   Megatron-LM's IndexedDataset; datatrove writes it, too
.bin with a header             llm.c and modded-nanogpt; an EOS token begins each document
.bin without one               nanoGPT: ids only; an EOS token ends each document
.npy                           OLMo: ids only, or an array as numpy saves it
a folder with a manifest.json  a token cache of lmtrain
"""

import io
import os
import struct
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact
from lmtrain.config.remote import without_query
from lmtrain.data.cache_manifest import CacheManifest, ShardInfo, load_manifest, manifest_path, shard_path
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TokensFormat
from lmtrain.data.sampled import sample_checksum
from lmtrain.data.token_file import MegatronIndex, TokenLayout
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.runtime.storage import file_size, is_url, read_range

EXTENSIONS = (".bin", ".npy")

# Headers of llm.c are 256 numbers of four bytes: this one, a version, and the number of tokens.
_LLM_C_BYTES = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
# Integer types by their codes in an .idx.
_MEGATRON_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

# Types of `TokensFormat`.
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

_NUMPY = b"\x93NUMPY"
_NUMPY_BYTES = 4096


@dataclass(frozen=True)
class TokenSource:
    """A file that is read in place. `info` is what the cache's manifest says of it: its source has a `fingerprint` of
    parts of the file and its index, and when it was `modified` in ns, None for one at a URL."""

    url: str
    bytes: int
    info: ShardInfo

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return redact(self.url)

    @property
    def recorded(self) -> dict[str, Any]:
        """The source as in manifests."""
        return self.info.source


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
    size = _size(url)
    read = partial(read_range, url)
    own, ids = config.format, tokenizer.vocab_size
    assert isinstance(own, TokensFormat)
    start = read(0, _NUMPY_BYTES)
    index_url = _index_of(url)
    eos = own.eos_id if own.eos_id is not None else tokenizer.eos_id
    if eos is not None and eos >= ids:
        raise UserError(f"data.format.eos_id: {eos} is not below the vocabulary size of {ids:,}")
    layout = TokenLayout("", 0, 0, ids, eos, own.eos_at or "last")
    checksum = sample_checksum(size, read)
    documents = None
    if index_url is not None:
        layout = _megatron(url, index_url, size, replace(layout, eos=None))
        assert layout.index is not None
        documents = layout.index.entries - 1
    elif (dtype := _LLM_C.get(_llm_c_kind(start))) is not None:
        tokens = int.from_bytes(start[8:12], "little")
        layout = replace(layout, dtype=dtype, offset=_LLM_C_BYTES, tokens=tokens, eos_at=own.eos_at or "first")
        if size != layout.offset + tokens * np.dtype(dtype).itemsize:
            raise UserError(
                f"{url}: truncated, or damaged: its header has {tokens:,} tokens of {np.dtype(dtype).itemsize} bytes, "
                f"but the file has {size:,} bytes"
            )
    elif start.startswith(_NUMPY):
        layout = _numpy(url, start, size, layout)
    else:
        width = np.dtype(dtype := _DTYPES[own.dtype or "uint16"]).itemsize
        if size % width:
            raise UserError(f"{url}: its {size:,} bytes are no multiple of {width}: truncated, or not {own.dtype}")
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
    modified = None if is_url(url) else os.stat(url).st_mtime_ns
    fingerprint = checksum[:16] + (layout.index.checksum[:16] if layout.index else "")
    source = {"url": redact(url), "bytes": size, "fingerprint": fingerprint, "modified": modified}
    described = asdict(layout)
    file = url if is_url(url) else os.path.realpath(url)
    info = ShardInfo(file, source, size, checksum, layout.tokens, documents, layout=described)
    return TokenSource(url, size, info)


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
    return TokenSource(path, info.bytes, replace(described, dtype=manifest.dtype))


def _size(url: str) -> int:
    size = file_size(url)
    if size is None:
        raise UserError(f"{url}: no such file")
    return size


def _index_of(url: str) -> str | None:
    """The .idx next to a .bin, None if there is none."""
    stem, extension = os.path.splitext(url)
    index = f"{stem}.idx"
    return index if extension == ".bin" and file_size(index) is not None else None


def _llm_c_kind(start: bytes) -> tuple[int, int]:
    return int.from_bytes(start[:4], "little"), int.from_bytes(start[4:8], "little")


def _megatron(url: str, index_url: str, size: int, layout: TokenLayout) -> TokenLayout:
    index_size = _size(index_url)
    start = read_range(index_url, 0, _MEGATRON_HEADER.size)
    if len(start) < _MEGATRON_HEADER.size or not start.startswith(_MEGATRON):
        raise UserError(f"{index_url}: not an index of Megatron-LM, but {url} is next to it; rename one of them")
    _, version, code, sequences, entries = _MEGATRON_HEADER.unpack(start)
    if version != 1:
        raise UserError(f"{index_url}: version {version} of Megatron-LM's index is not supported, only 1")
    if code not in _MEGATRON_TYPES:
        raise UserError(f"{index_url}: its data type (code {code}) is not one of token ids")
    pointers = _MEGATRON_HEADER.size + 4 * sequences
    documents = pointers + 8 * sequences
    if index_size < documents + 8 * entries or not entries:
        raise UserError(f"{index_url}: truncated: {index_size:,} bytes for {sequences:,} sequences")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    end = 0
    if sequences:
        last = int.from_bytes(read_range(index_url, documents - 8, documents), "little")
        end = last + int.from_bytes(read_range(index_url, pointers - 4, pointers), "little") * dtype.itemsize
    if end != size:
        raise UserError(f"{url}: has {size:,} bytes, but {index_url} describes {end:,}: one of them is truncated")
    index = MegatronIndex(
        index_url if is_url(index_url) else os.path.realpath(index_url),
        index_size,
        sample_checksum(index_size, partial(read_range, index_url)),
        sequences,
        entries,
        pointers,
        documents,
    )
    return replace(layout, dtype=dtype.str, tokens=size // dtype.itemsize, index=index)


def _numpy(url: str, start: bytes, size: int, layout: TokenLayout) -> TokenLayout:
    """The layout of an array as `numpy.save` writes it."""
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
    except ValueError as error:
        raise UserError(f"{url}: not an array of numpy: {error}") from None
    if dtype.kind not in "ui" or dtype.byteorder == ">":
        raise UserError(f"{url}: an array of {dtype}, not of token ids (little-endian integers)")
    if len(shape) != 1:
        raise UserError(f"{url}: an array of shape {shape}; token ids are expected in one dimension")
    if size != file.tell() + shape[0] * dtype.itemsize:
        raise UserError(f"{url}: truncated, or damaged: {size:,} bytes for {shape[0]:,} ids of {dtype}")
    return replace(layout, dtype=dtype.str, offset=file.tell(), tokens=shape[0])
