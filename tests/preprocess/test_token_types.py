"""Files of token ids: known headers are read, all others are refused, and no real file of ids is."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from lmtrain.data.token_file import sample_checksum
from lmtrain.preprocess.token_types import check_content, read_llm_c, read_numpy
from lmtrain.runtime.errors import UserError

IDS = 100_001


def check(content, dtype, vocab):
    sample = {}

    def read(start, end):
        sample[start] = content[start:end]
        return sample[start]

    sample_checksum(len(content), read)
    check_content("a.bin", len(content), sample, dtype, vocab)


def by_frequency(vocab, number=IDS, seed=0):
    """Ids as of natural text: the lower, the more frequent."""
    return np.exp(np.random.default_rng(seed).random(number) * np.log(vocab)).astype(np.int64) - 1


def sparse(ids, fill, share=0.001):
    return np.where(np.random.default_rng(1).random(len(ids)) < share, ids, fill)


def padded_rows():
    return np.concatenate([np.append(by_frequency(32000, 57, seed), np.zeros(455)) for seed in range(200)])


RIGHT = {
    "text of a large vocabulary": ("<u2", 65536, by_frequency(65536)),
    "every id equally often": ("<u2", 65536, np.random.default_rng(0).integers(0, 65536, IDS)),
    "mostly zeros": ("<u2", 50257, sparse(by_frequency(50257), 0)),
    "mostly EOS": ("<u2", 50257, sparse(by_frequency(50257), 50256)),
    "only zeros": ("<u2", 50257, np.zeros(IDS)),
    "padded tail": ("<u2", 50257, np.append(by_frequency(50257, 3000), np.zeros(IDS))),
    "padded rows": ("<u2", 32000, padded_rows()),
    "every second id on average is 0": ("<u2", 50257, sparse(by_frequency(50257), 0, 0.5)),
    "bytes": ("<u2", 257, by_frequency(257)),
    "bytes in a large vocabulary": ("<u2", 50257, by_frequency(256)),
    "two ids": ("<u2", 2, np.random.default_rng(0).integers(0, 2, IDS)),
    "sorted": ("<u2", 50257, np.sort(by_frequency(50257))),
    "codebooks in turn": ("<u2", 8192, np.random.default_rng(0).integers(0, 1024, IDS) + np.arange(IDS) % 4 * 1024),
    "few": ("<u2", 50257, np.array([5, 0, 7, 0, 9])),
    "none": ("<u2", 50257, np.zeros(0)),
    "four bytes": ("<u4", 128256, by_frequency(128256)),
    "four bytes, small ids": ("<u4", 50257, by_frequency(300)),
    "four bytes, mostly padding above 65,535": ("<u4", 131073, sparse(by_frequency(131073), 131072, 0.3)),
    "four bytes, a million ids": ("<u4", 1 << 20, np.random.default_rng(0).integers(0, 1 << 20, IDS)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_real_files_are_accepted(name):
    dtype, vocab, ids = RIGHT[name]
    check(ids.astype(dtype).tobytes(), dtype, vocab)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("vocab", "size"), [(50257, 200), (128256, IDS)])
@pytest.mark.parametrize(
    ("stored", "read_as"), [("u4", "<u2"), ("i4", "<u2"), ("i8", "<u2"), ("i8", "<u4"), ("u2", "<u4"), ("u2", "<u2")]
)
def test_ids_of_another_type_are_refused(order, vocab, size, stored, read_as):
    if order == "<" and stored == read_as[1:]:
        return
    ids = np.minimum(by_frequency(vocab, size), 65535 if stored == "u2" else vocab)
    advice = {"2": "data.format.dtype: uint16", "4": "data.format.dtype: uint32", "8": "int64"}[stored[1]]
    with pytest.raises(UserError, match=advice if order == "<" else "big-endian" if read_as == "<u2" else "a.bin"):
        check(ids.astype(order + stored).tobytes(), read_as, vocab)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize("read_as", ["<u2", "<u4"])
def test_floats_are_refused(dtype, read_as):
    with pytest.raises(UserError, match=f"like float{8 * int(dtype[2])}"):
        check(by_frequency(2000, 1000).astype(dtype).tobytes(), read_as, 1 << 32)


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", bytes(range(256)))
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), None)
    return file.getvalue()


HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
OTHERS = {
    "zip": zipped(),
    "pickle": pickle.dumps(list(range(300)), protocol=2),
    "a pickle": pickle.dumps(list(range(300)), protocol=4),
    "gzip": gzip.compress(bytes(range(256)) * 9),
    "GGUF": b"GGUF" + bytes(100),
    "safetensors": struct.pack("<Q", len(HEADER)) + HEADER + bytes(4),
    "tar": tarred(),
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 20000\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>",
    "text": "1 50256 7 8 9 Grüße\n".encode() * 20_000,
    "Parquet": b"PAR1" + bytes(100),
    "index of Megatron-LM": b"MMIDIDX\0\0" + bytes(100),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_refused_by_their_kind(name):
    with pytest.raises(UserError, match=rf"a.bin: not token ids: .*{name}"):
        check(OTHERS[name], "<u2", 65536)


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


SHAPES = ["(-4,)", "(4611686018427387904,)", f"(0x1{'0' * 5000},)", "(2, 2)", "()", "4", "('4',)", "(True,)"]
TYPES = ["'|O'", "'<f4'", "'datetime64[ns]'", "[('a', '<u2')]"]
TEXTS = ["[1, 2]", "{'descr': '<u2'}", "{'descr': '<u2'", "(" * 5000, "__import__('os').mkdir('run')"]
HOSTILE = [
    *(b"\x93NUMPY", saved(described(), (9, 9)), saved(described())[:30]),
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),  # an enormous header
    *map(saved, [*TEXTS, b"\xff\xfe\xff", bytes(64)]),
    saved(described(shape="(__import__('os').mkdir('run') or 4,)")),
    *(saved(described(descr)) for descr in TYPES),
    saved(described("'>u4'", "(2,)")),  # big-endian
    *(saved(described(shape=shape)) for shape in SHAPES),
    *(saved(described(), body=bytes(size)) for size in (7, 9)),
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_other_arrays_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a.npy: "):
        read(tmp_path / "a.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
