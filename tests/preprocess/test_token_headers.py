"""Headers of llm.c and numpy: known ones are read, all others are refused with the file, and never run."""

import struct

import numpy as np
import pytest

from lmtrain.preprocess.token_types import read_llm_c, read_numpy
from lmtrain.runtime.errors import UserError


def llm_c(magic, version, order="<"):
    return struct.pack(f"{order}3i", magic, version, 512) + bytes(1012)


def test_headers_of_llm_c():
    assert read_llm_c("a.bin", llm_c(20240520, 1)) == "<u2"
    assert read_llm_c("a.bin", llm_c(20240801, 7)) == "<u4"
    for other in (b"", b"\x01\x00", llm_c(20240520, 1)[:4], bytes(1024), np.arange(512, dtype="<u2").tobytes()):
        assert read_llm_c("a.bin", other) is None


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (llm_c(20240520, 2), r"a.bin: .*\(20240520\) of version 2,.* only 1"),
        (llm_c(20240801, 1), r"a.bin: .*\(20240801\) of version 1,.* only 7"),
        (llm_c(20240520, 1, ">"), r"a.bin: .*big-endian.*version 1"),
        (llm_c(20240801, 9, ">"), r"a.bin: .*big-endian.*version 9"),
        (llm_c(20240326, 3), r"a.bin: has parameters of a model"),
        (llm_c(20240328, 2), r"a.bin: has a tokenizer"),
    ],
)
def test_other_headers_of_llm_c_are_refused(header, message):
    with pytest.raises(UserError, match=message):
        read_llm_c("a.bin", header)


def read(path):
    content = path.read_bytes()
    return read_numpy("a.npy", len(content), lambda start, end: content[start:end])


@pytest.mark.parametrize("dtype", ["|u1", "|i1", "<u2", "<i4", "<i8", "<u8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_of_numpy(tmp_path, dtype, version):
    ids = np.arange(100).astype(dtype)
    path = tmp_path / "a.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, ids, version)
    found, offset, number = read(path)
    np.testing.assert_array_equal(np.frombuffer(path.read_bytes(), found, number, offset), ids)


def saved(header, version=(1, 0), body=bytes(8)):
    text = header if isinstance(header, bytes) else header.encode()
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + body


def described(descr="'<u2'", shape="(4,)", more=""):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {more}}}\n"


def test_headers_of_any_size_and_of_fortran_are_read(tmp_path):
    path = tmp_path / "a.npy"
    for content in (
        saved(described() + " " * 10_000),
        saved(described().replace("False", "True")),
        saved(described(shape="(4L,)")),  # of Python 2
        saved(described() + " " * 100_000, (2, 0)),
    ):
        path.write_bytes(content)
        assert read(path) == ("<u2", len(content) - 8, 4)


HOSTILE = {
    "no header": b"\x93NUMPY",
    "unknown version": saved(described(), (9, 9)),
    "truncated header": saved(described())[:30],
    "enormous header": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
    "code": saved("__import__('os').mkdir('run')"),
    "code inside": saved(described(shape="(__import__('os').mkdir('run') or 4,)")),
    "not UTF-8": saved(b"\xff\xfe\xff"),
    "no dict": saved("[1, 2]"),
    "missing keys": saved("{'descr': '<u2'}"),
    "unbalanced": saved("{'descr': '<u2'"),
    "nested": saved("(" * 5000),
    "zero bytes": saved(bytes(64)),
    "object": saved(described("'|O'")),
    "float": saved(described("'<f4'")),
    "complex name": saved(described("'datetime64[ns]'")),
    "structured": saved(described("[('a', '<u2')]")),
    "big-endian": saved(described("'>u4'", "(2,)")),
    "negative": saved(described(shape="(-4,)")),
    "huge": saved(described(shape="(4611686018427387904,)")),
    "number of thousands of digits": saved(described(shape=f"(0x1{'0' * 5000},)")),
    "two dimensions": saved(described(shape="(2, 2)")),
    "no dimension": saved(described(shape="()")),
    "no tuple": saved(described(shape="4")),
    "no number": saved(described(shape="('4',)")),
    "true": saved(described(shape="(True,)")),
    "too short": saved(described(), body=bytes(7)),
    "too long": saved(described(), body=bytes(9)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_arrays_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npy").write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match=r"a.npy: "):
        read(tmp_path / "a.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
