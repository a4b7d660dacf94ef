"""Indices of Megatron-LM: those of its builder are accepted, and each wrong entry is found with its place."""

import struct

import numpy as np
import pytest

from lmtrain.data import token_file
from lmtrain.data.token_file import check_index, read_index
from lmtrain.runtime.errors import UserError

LENGTHS = [3, 0, 5, 2, 4, 0, 1]
DOCUMENTS = [0, 2, 2, 3, 7]


def index(lengths=LENGTHS, documents=DOCUMENTS, pointers=None, modes=b"", version=1, code=8, magic=b"MMIDIDX\0\0"):
    """The content of an .idx of ids of two bytes."""
    sizes = np.array(lengths, "<i4")
    if pointers is None:
        pointers = 2 * (np.cumsum(sizes, dtype="<i8") - sizes)
    header = struct.pack("<9sQBQQ", magic, version, code, len(sizes), len(documents))
    return header + sizes.tobytes() + np.array(pointers, "<i8").tobytes() + np.array(documents, "<i8").tobytes() + modes


def check(content, bin_bytes=30):
    def read(start, end):
        assert 0 <= start <= end
        return content[start:end]

    dtype, found = read_index("a.idx", len(content), read, "a.bin", bin_bytes)
    check_index(found, read, dtype.itemsize, bin_bytes)


@pytest.mark.parametrize("checked", [2, 1 << 20])
def test_what_the_builder_writes_is_accepted(monkeypatch, checked):
    monkeypatch.setattr(token_file, "_CHECKED", checked)
    check(index())
    check(index(modes=bytes(len(LENGTHS))))  # multimodal
    check(index([], [0]), 0)
    check(index([], [0, 0, 0]), 0)  # empty documents
    check(index([0, 0], [0, 1, 2]), 0)
    check(index(documents=[0, 7]))


def changed(values, at, value):
    return [*values[:at], value, *values[at + 1 :]]


POINTERS = [0, 6, 6, 16, 20, 28, 28]


@pytest.mark.parametrize("checked", [2, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (index(pointers=[0, 6, 16, 6, 20, 28, 28]), "sequence 2 has 5 tokens from byte 16"),
        (index(pointers=changed(POINTERS, 3, -16)), "sequence 3 has 2 tokens from byte -16"),
        (index(pointers=changed(POINTERS, 3, 17)), "sequence 3 has 2 tokens from byte 17"),
        (index(pointers=changed(POINTERS, 4, 18)), "sequence 4 has 4 tokens from byte 18"),
        (index(pointers=changed(POINTERS, 0, 2)), "sequence 0 has 3 tokens from byte 2"),
        (index(pointers=changed(POINTERS, 5, 1 << 60)), "sequence 5 has 0 tokens from byte 1,152"),
        (index(changed(LENGTHS, 1, -1), pointers=POINTERS), "sequence 1 has -1 tokens"),
        (index(changed(LENGTHS, 2, 4), pointers=POINTERS), "sequence 3 has 2 tokens"),
        (index(changed(LENGTHS, 1, 1 << 30), pointers=POINTERS), "sequence 1 has 1,073"),
        (index(documents=[1, 2, 2, 3, 7]), "document 0 begins at sequence 1"),
        (index(documents=[0, 2, 1, 3, 7]), "document 2 begins at sequence 1 of 7, and the one before it at 2"),
        (index(documents=[0, 2, 3, 2, 7]), "document 3 begins at sequence 2 of 7, and the one before it at 3"),
        (index(documents=[0, 2, 2, 8, 7]), "document 3 begins at sequence 8"),
        (index(documents=[0, -2, 2, 3, 7]), "document 1 begins at sequence -2"),
        (index(documents=[0, 2, 2, 3, 6]), "its documents end at sequence 6 of 7"),
        (index() + bytes(3), r"bytes, but 7 sequences and 5 documents take"),
        (index(documents=[]), "truncated"),
        (index(version=2), "version 2"),
        (index(version=1 << 56), "version 72,?057"),
        (index(code=6), "code 6"),
        (index(magic=b"TNTIDX\0\0\0"), "not an index"),
    ],
)
def test_a_wrong_entry_is_named(monkeypatch, checked, content, message):
    monkeypatch.setattr(token_file, "_CHECKED", checked)
    with pytest.raises(UserError, match=rf"a.idx: .*{message}"):
        check(content)
