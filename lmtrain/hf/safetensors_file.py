"""Safetensors files, tensor by tensor: a file is read and written without being held in memory.

    8 bytes: length of the header, little endian; the header: JSON of {name: {dtype, shape, data_offsets}}; the data

The format's own library reads local files only, and writes from a map of all tensors. It can read files written here.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.config.remote import open_fs, told
from lmtrain.runtime.storage import file_size, is_url

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


# Names of dtypes in the format, such as F8_E4M3 and U32.
_TYPE = re.compile(r"[A-Z]+\d+\w*")


class TensorInfo(NamedTuple):
    """Dtype, shape and byte range of a tensor in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: str) -> dict[str, TensorInfo]:
    """Tensors of a file (path or URL). Raises `UserError` if it is not in the format."""
    size = int.from_bytes(_read(path, 0, 8), "little")
    try:
        if size > 1 << 30:
            raise ValueError("header too large")
        header = json.loads(_read(path, 8, 8 + size))
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        _check_types(path, tensors)
        return {name: _info(entry, 8 + size) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a safetensors file, or corrupt: {error}") from None


def check_length(path: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise `UserError` if the file is truncated."""
    size = file_size(path)
    if size is not None and any(info.end > size for info in tensors.values()):
        raise UserError(f"{path}: truncated: shorter than its header says; the download may be incomplete")


def read_tensor(path: str, info: TensorInfo) -> np.ndarray:
    """Read one tensor. Raises `UserError` if the file is truncated."""
    content = _read(path, info.begin, info.end)
    if len(content) != info.dtype.itemsize * math.prod(info.shape):
        raise UserError(f"{path}: truncated: shorter than its header says; the download may be incomplete")
    return np.frombuffer(content, info.dtype).reshape(info.shape)


def read_rows(path: str, info: TensorInfo, first: int, last: int) -> np.ndarray:
    """Read only the rows `first` up to `last` of a tensor. Raises the same errors as `read_tensor`."""
    width = info.dtype.itemsize * math.prod(info.shape[1:])
    part = info._replace(shape=(last - first, *info.shape[1:]), begin=info.begin + first * width)
    return read_tensor(path, part._replace(end=part.begin + (last - first) * width))


def header_of(shapes: Mapping[str, Sequence[int]], dtype: np.dtype[Any]) -> bytes:
    """Header of a file with these tensors; their data follow in the same order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers 4
    offset = 0
    for name, shape in shapes.items():
        size = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_tensor(file: BinaryIO, tensor: np.ndarray) -> None:
    """Append a tensor's data."""
    file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def _check_types(path: str, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in tensors.items():
        kind = entry["dtype"]
        if isinstance(kind, str) and kind not in _DTYPES and _TYPE.fullmatch(kind):
            raise UserError(f"{path}: {name} has the unsupported dtype {kind}; is the model quantized?")


def _info(entry: Mapping[str, Any], data_begin: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin}, {end}")
    return TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"]), data_begin + begin, data_begin + end)


def _read(path: str, begin: int, end: int) -> bytes:
    """Read only the bytes `begin` up to `end` of a path or URL."""
    if not is_url(path):
        with told(path, "read"), open(os.path.expanduser(path), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)
    with told(path, "read"):
        fs, inside = open_fs(path)
        content: bytes = fs.cat_file(inside, start=begin, end=end)
        return content
