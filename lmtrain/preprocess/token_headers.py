"""Headers of files of token ids: those of llm.c, and of arrays of numpy."""

import ast
import re

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.data.megatron_index import Read

# Headers of llm.c are 256 numbers of four bytes: this one, a version, and the number of tokens.
LLM_C_BYTES = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# Other files of llm.c, by their first number.
_NO_TOKENS = {
    20240326: "parameters of a model",
    20240327: "activations of a model",
    20240328: "a tokenizer",
    20240522: "items of an evaluation",
    20240527: "the state of a run",
}

NUMPY = b"\x93NUMPY"
_NUMPY_START = 12  # with the size of the header
_MAX_NUMPY_BYTES = 1 << 20
_NUMPY_TYPE = re.compile(r"[<|=][ui][1248]")


def read_llm_c(url: str, start: bytes) -> str | None:
    """The type of the ids after a header of llm.c or modded-nanogpt; None if the file does not start with one.

    Raises `UserError` for another version, another byte order, and other files of llm.c.
    """
    for order in ("little", "big"):
        magic, version = (int.from_bytes(start[at : at + 4], order) for at in (0, 4))
        if magic in _NO_TOKENS and len(start) >= 8:
            raise UserError(f"{url}: has {_NO_TOKENS[magic]}, written by llm.c ({magic}), not token ids")
        versions = [known for number, known in _LLM_C if number == magic]
        if not versions or len(start) < 8:
            continue
        if order == "big":
            raise UserError(
                f"{url}: has a big-endian header of llm.c ({magic}, version {version}); write it as little-endian"
            )
        if version not in versions:
            raise UserError(
                f"{url}: has a header of llm.c ({magic}) of version {version}, which is not supported, only "
                f"{versions[0]}"
            )
        return _LLM_C[magic, version]
    return None


def read_numpy(url: str, size: int, read: Read) -> tuple[str, int, int]:
    """The type, the byte of the first one, and the number of the ids of an array as `numpy.save` writes it.

    The header is the text of a Python dict, and read as such, without being run. Raises `UserError`.
    """
    start = read(0, _NUMPY_START)
    version, width = tuple(start[6:8]), 2 if start[6:7] == b"\x01" else 4
    if version not in {(1, 0), (2, 0), (3, 0)}:
        raise UserError(f"{url}: an array of numpy in the unknown version {'.'.join(map(str, version))}")
    offset = 8 + width + int.from_bytes(start[8 : 8 + width], "little")
    if not _NUMPY_START <= offset <= min(size, _MAX_NUMPY_BYTES):
        raise UserError(f"{url}: not an array of numpy: its header of {offset:,} bytes is corrupt or truncated")
    try:
        text = read(8 + width, offset).decode()
        header = ast.literal_eval(re.sub(r"(?<=\d)L\b", "", text).strip())  # Python 2 wrote 10L
        dtype, shape = header["descr"], header["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise UserError(f"{url}: not an array of numpy: its header cannot be parsed") from None
    if not isinstance(dtype, str) or not _NUMPY_TYPE.fullmatch(dtype):
        raise UserError(
            f"{url}: an array of {_described(dtype)}, not of token ids (little-endian integers); convert it with "
            "numpy's astype"
        )
    if not isinstance(shape, tuple) or len(shape) != 1 or type(shape[0]) is not int or not 0 <= shape[0] < 1 << 63:
        raise UserError(f"{url}: an array of shape {_described(shape)}; token ids are expected in one dimension")
    if size != offset + shape[0] * np.dtype(dtype).itemsize:
        raise UserError(f"{url}: truncated, or damaged: {size:,} bytes for {shape[0]:,} ids of {np.dtype(dtype)}")
    return np.dtype(dtype).str, offset, shape[0]


def _described(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "an enormous number"
    return text if len(text) <= 100 else f"{text[:100]}..."
