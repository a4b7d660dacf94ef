"""Safetensors files, tensor by tensor: a file is read and written without being held in memory.

    8 bytes: length of the header, little endian; the header: JSON of {name: {dtype, shape, data_offsets}}; the data

The format's own library reads local files only, and writes from a map of all tensors. It can read files written here.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import file_size, read_range
from lmtrain.runtime.text import parse_json, refuse_pointer

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
_START_BYTES = 64


# Names of dtypes in the format, such as F8_E4M3 and U32.
_TYPE = re.compile(r"[A-Z]+\d+\w*")


class TensorInfo(NamedTuple):
    """Dtype, shape and byte range of a tensor in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: str) -> dict[str, TensorInfo]:
    """Tensors of a file (path or URL). Raises `UserError` if it is not in the format, or truncated."""
    size = int.from_bytes(_read(path, 0, 8), "little")
    try:
        if size > 1 << 30:
            raise ValueError("header too large")
        header = parse_json(_read(path, 8, 8 + size))
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        _check_types(path, tensors)
        infos = {name: _info(name, entry, 8 + size) for name, entry in tensors.items()}
        _check_overlaps(infos)
    except (ValueError, KeyError, TypeError) as error:
        refuse_pointer(_read(path, 0, _START_BYTES), path)
        raise UserError(f"{path}: not a safetensors file, or corrupt: {error}") from None
    length = file_size(path)
    if length is not None and any(info.end > length for info in infos.values()):
        raise _truncated(path)
    return infos


def read_tensor(path: str, info: TensorInfo) -> np.ndarray:
    """Read one tensor. Raises `UserError` if the file is truncated."""
    content = _read(path, info.begin, info.end)
    if len(content) != info.dtype.itemsize * math.prod(info.shape):
        raise _truncated(path)
    return np.frombuffer(content, info.dtype).reshape(info.shape)


class SafetensorsWeights:
    """Tensors of several files. Every process reads the headers before any reads its share of the tensors: if an
    invalid file stopped one process alone, the others would wait for it."""

    def __init__(self, paths: list[str]):
        self._where: dict[str, tuple[str, TensorInfo]] = {}
        for path in paths:
            infos = read_header(path)
            if twice := sorted(infos.keys() & self._where.keys()):
                raise UserError(f"{path}: {twice[0]} is also in {self._where[twice[0]][0]}")
            self._where |= {name: (path, info) for name, info in infos.items()}
        self.shapes = {name: info.shape for name, (_, info) in self._where.items()}
        self.dtypes = {name: str(info.dtype) for name, (_, info) in self._where.items()}
        self.files = {name: path for name, (path, _) in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        return read_tensor(*self._where[name])

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        path, info = self._where[name]
        shape = (last - first, *info.shape[1:])
        width = info.dtype.itemsize * math.prod(info.shape[1:])
        begin = info.begin + first * width
        return read_tensor(path, TensorInfo(info.dtype, shape, begin, begin + shape[0] * width))


def header_of(tensors: Mapping[str, tuple[Sequence[int], np.dtype[Any]]]) -> bytes:
    """Header of a file with tensors of these shapes and dtypes; their data follow in the same order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers 4
    offset = 0
    for name, (shape, dtype) in tensors.items():
        size = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_tensor(file: BinaryIO, tensor: np.ndarray) -> None:
    """Append a tensor's data."""
    file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def _truncated(path: str) -> UserError:
    return UserError(f"{path}: truncated: shorter than its header says; the download may be incomplete")


def _check_overlaps(tensors: Mapping[str, TensorInfo]) -> None:
    stored = sorted((item for item in tensors.items() if item[1].begin < item[1].end), key=lambda item: item[1].begin)
    for (before, first), (name, second) in pairwise(stored):
        if second.begin < first.end:
            raise ValueError(f"the data of {name} and {before} overlap")


def _check_types(path: str, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in tensors.items():
        kind = entry["dtype"]
        if isinstance(kind, str) and kind not in _DTYPES and _TYPE.fullmatch(kind):
            raise UserError(f"{path}: {name} has the unsupported dtype {kind}; is the model quantized?")


def _info(name: str, entry: Mapping[str, Any], data_begin: int) -> TensorInfo:
    (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), _DTYPES[entry["dtype"]]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} has the shape {list(shape)} and the data_offsets {begin}, {end}")
    if end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"the data_offsets {begin}, {end} of {name} do not have the size of its shape {list(shape)}")
    return TensorInfo(dtype, shape, data_begin + begin, data_begin + end)


def _read(path: str, begin: int, end: int) -> bytes:
    """Read only the bytes `begin` up to `end` of a path or URL."""
    with remote_errors(path, "read"):
        return read_range(os.path.expanduser(path), begin, end)
