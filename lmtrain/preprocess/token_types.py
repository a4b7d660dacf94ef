"""Types of token ids in files: by a header, or by what a file without one looks like.

It is judged by the parts that are read for its checksum: 32 of 4 KB at equal distances. So this costs nothing, and
no part decides alone: a long document of a strange kind, or a padded tail, is a few parts.

**Other files** are known by their first bytes (at least four, or fewer with more conditions, since two are an id), and
text by having no control characters: ids of two bytes would all be above 2,303.

**Wider ids.** An id below 2^16 or 2^20 in four bytes is two numbers of two bytes, the second of which is 0, or at most
15; in eight bytes three of four are. So a file has wider ids if, of all pairs of two-byte numbers, the second is at
most k, and in at least 32 pairs the first is larger than k, for k = 15 or the largest that the vocabulary has. For
big-endian ids it is the other way round. In a file of ids of two bytes an id is as often first as second, since
documents have odd and even lengths: each of the 32 pairs is a coin that falls on the same side, 2^-31 together. Pairs
of two small ids are not counted: padding, zeros, a file that is mostly EOS tokens, and vocabularies of up to 16 tokens
say nothing; nor do files of less than 32 such pairs. A false alarm needs an id up to k at every second place of all
parts, such as the bytes of texts in UTF-16. Such data can be saved with a header, by `numpy.save`.

**Floats** are all integers, up to 2^11 in two bytes and 2^24 in four, and at least 32 different ones; those that the
bytes of ids make are not: they are below 1, or have fractions.

**Narrower ids.** Two ids of two bytes, read as one of four bytes, give a number whose upper half is often above its
lower half. In ids below 2^20 this is so for 120 of them at most, as the upper half is at most 15. So a file has ids of
two bytes if at least 32 *different* ids are of that kind, and a quarter of all different ids. Padding and EOS tokens
count once. A false alarm needs a vocabulary of more than 2^24 ids.

**Big-endian ids of two bytes** have a first byte that is less random than the second one. Where the bytes of the
vocabulary do not tell, a difference of one bit of entropy over at least 4,096 ids does: tokenizers number tokens by
frequency, and their lower byte takes all values.
"""

import ast
import re
from collections.abc import Mapping

import numpy as np

from lmtrain.data.token_file import MEGATRON, Read
from lmtrain.runtime.errors import UserError

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


_PAIRS = 32
_ENTROPY_IDS = 4096
_ENTROPY_BITS = 1.0
_TEXT_BYTES = 32
_MAX_UPPER = 15

_STARTS = {
    b"PK\x03\x04": "a zip archive (torch.save writes one, too)",
    b"PK\x05\x06": "an empty zip archive",
    b"GGUF": "a GGUF model",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x7fELF": "a program",
    b"SQLite format 3\x00": "an SQLite database",
    b"%PDF-": "a PDF",
    b"TNTIDX\x00\x00": "an old index of fairseq or Megatron-LM",
    MEGATRON: "an index of Megatron-LM, which belongs to a .bin",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x8a\x95}\](cKJX]")  # its protocol, and an operation that one starts with
_NAMES = {
    "<u2": "uint16",
    "<u4": "uint32 or int32",
    "<i8": "int64",
    ">u2": "big-endian uint16",
    ">u4": "big-endian uint32 or int32",
    ">i8": "big-endian int64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
}
_SETTINGS = {"<u2": "uint16", "<u4": "uint32"}


def check_content(url: str, size: int, sample: Mapping[int, bytes], dtype: str, vocab_size: int) -> None:
    """Raise `UserError` if a file without a header does not look like ids of type `dtype`.

    `sample` has parts of the file by their first byte, that of the first and last bytes among them.
    """
    parts = sorted(sample.items())
    if what := _other_file(parts, size):
        raise UserError(f"{url}: not token ids: it looks like {what}")
    aligned = b"".join(part[-start % 8 :][: (len(part) - -start % 8) // 8 * 8] for start, part in parts)
    found = _likely_type(aligned, dtype, vocab_size)
    if found is None or found == dtype:
        return
    if found in _SETTINGS:
        advice = f"set data.format.dtype: {_SETTINGS[found]}"
        if found == "<u4":
            advice += ", or, if Megatron-LM wrote it, put its .idx next to it"
    else:
        advice = f"convert it: numpy.fromfile(path, '{found}').astype('<u4').tofile(new_path)"
    raise UserError(
        f"{url}: has no header, and its ids do not look like {_NAMES[dtype]}, but like {_NAMES[found]}; {advice}. If "
        f"they are {_NAMES[dtype]}, save them as .npy with numpy.save, whose header has the type"
    )


def _likely_type(content: bytes, dtype: str, vocab_size: int) -> str | None:
    """The type of ids that these bytes look like, if it is clear."""
    halves = np.frombuffer(content, "<u2").reshape(-1, 4)
    for kind, largest in (("<f2", 1 << 11), ("<f4", 1 << 24), ("<f8", 1 << 24)):
        if _are_integers(np.frombuffer(content, kind), largest):
            return kind
    if wider := _wider(halves, vocab_size):
        return wider
    ids = np.frombuffer(content, dtype)
    if dtype == "<u4":
        different = np.unique(ids)
        mixed = int(((different >> 16) > (different & 0xFFFF)).sum())
        is_outside = len(ids) >= _PAIRS and (ids >= vocab_size).any() and (halves < vocab_size).all()
        if is_outside or (mixed >= _PAIRS and mixed * 4 >= len(different)):
            return "<u2"
        return None
    swapped = np.frombuffer(content, ">u2")
    if (ids >= vocab_size).any():
        return ">u2" if len(ids) >= _PAIRS and (swapped < vocab_size).all() else None
    lower, upper = (_entropy(np.frombuffer(content, np.uint8)[at::2]) for at in (0, 1))
    return ">u2" if len(ids) >= _ENTROPY_IDS and upper > lower + _ENTROPY_BITS else None


def _wider(halves: np.ndarray, vocab_size: int) -> str | None:
    """The type of ids of four or eight bytes that these numbers of two bytes, [:, 4], are the parts of."""
    for order in "<>":
        parts = halves if order == "<" else halves.byteswap()[:, ::-1]  # the least significant first
        for most in {_MAX_UPPER, (vocab_size - 1) >> 16}:
            if (parts[:, 1] <= most).all() and not parts[:, 2:].any() and (parts[:, 0] > most).sum() >= _PAIRS:
                return f"{order}i8"
            if (parts[:, 1::2] <= most).all() and (parts[:, ::2] > most).sum() >= _PAIRS:
                return f"{order}u4"
    return None


def _are_integers(floats: np.ndarray, largest: int) -> bool:
    for part in (floats[:256], floats):  # nearly always the first ones tell
        with np.errstate(invalid="ignore"):
            is_integer = (part >= 0) & (part <= largest) & (part == np.floor(part))
        if not is_integer.all():
            return False
    return len(np.unique(floats)) >= _PAIRS


def _entropy(values: np.ndarray) -> float:
    """Of bytes, in bits."""
    share = np.bincount(values, minlength=256) / max(len(values), 1)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def _other_file(parts: list[tuple[int, bytes]], size: int) -> str | None:
    """What kind of file this is, if it is a known one and has no ids."""
    if not parts or not size:
        return None
    start, end = parts[0][1], parts[-1][1]
    for magic, what in _STARTS.items():
        if start.startswith(magic):
            return what
    if start.startswith(b"\x1f\x8b\x08") and start[3:4] < b"\x20":
        return "compressed by gzip"
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return "compressed by bzip2"
    if _PICKLE.match(start) and end.endswith(b"."):
        return "a pickle (torch.save wrote some)"
    if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") <= size - 8:
        return "a safetensors file"
    if start[257:262] == b"ustar":
        return "a tar archive"
    return _text(parts, size)


def _text(parts: list[tuple[int, bytes]], size: int) -> str | None:
    content = np.frombuffer(b"".join(part for _, part in parts), np.uint8)
    is_control = (content < 9) | ((content > 13) & (content < 32) & (content != 27)) | (content == 127)
    if size < _TEXT_BYTES or is_control.any():
        return None
    start = parts[0][1]
    try:
        start.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS; get the file itself with `git lfs pull`"
    if start[:512].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a page of HTML or XML, such as an error of a server"
    return "text; token ids as text are rows of .jsonl, and texts are read without data.format"
