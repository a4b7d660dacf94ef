"""Files without a header that are not what they are read as are refused; no real file of ids is."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from lmtrain.data.token_file import sample_checksum
from lmtrain.preprocess.token_types import check_content
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
@pytest.mark.parametrize("vocab", [50257, 128256])
@pytest.mark.parametrize("size", [200, IDS])
@pytest.mark.parametrize(
    ("stored", "read_as"), [("u4", "<u2"), ("i4", "<u2"), ("i8", "<u2"), ("i8", "<u4"), ("u2", "<u4"), ("u2", "<u2")]
)
def test_ids_of_another_type_are_refused(order, vocab, size, stored, read_as):
    if order == "<" and stored == read_as[1:]:
        return
    ids = np.minimum(by_frequency(vocab, size), 65535 if stored == "u2" else vocab)
    if order == ">" and size < IDS and (stored, vocab) == ("u2", 128256):
        return  # any two bytes are an id of the vocabulary, and these are too few to tell
    with pytest.raises(UserError) as error:
        check(ids.astype(order + stored).tobytes(), read_as, vocab)
    message = str(error.value)
    if (order, stored[1:]) == ("<", "8"):
        assert "like int64" in message
    elif stored[1:] == "4" and order == "<":
        assert "data.format.dtype: uint32" in message
        assert ".idx" in message
    elif stored == "u2" and order == "<":
        assert "data.format.dtype: uint16" in message
    elif read_as == "<u2":
        assert "big-endian" in message
        assert f"fromfile(path, '>{stored.replace('i4', 'u4')}')" in message


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
