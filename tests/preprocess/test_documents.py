"""Reading of the documents of files: compressed, damaged, and in parts."""

import bz2
import gzip
import json
import lzma
import re
import struct

import pytest
import zstandard

from lmtrain.preprocess.documents import DocumentReader, read_texts
from lmtrain.preprocess.records import Texts
from lmtrain.preprocess.sources import describe_source, split_source
from lmtrain.runtime.errors import UserError

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
# varied enough that half of a compressed file has some documents
TEXTS = [f"document {i} äöü 🙂 {i * 7919 % 1000003:x}" for i in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
# of different lengths
PARTED = [f'{{"text": "line {i} {"x" * (i * 37 % 90)}"}}' for i in range(60)]


@pytest.fixture
def write(tmp_path):
    def written(name, content):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return written


def texts_of(path):
    return list(read_texts(path, "text"))


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_and_concatenated_files_read_the_same_as_plain_ones(write, kind):
    assert texts_of(write(f"a.jsonl.{kind}", COMPRESS[kind](LINES))) == TEXTS
    assert texts_of(write(f"b.jsonl.{kind}", COMPRESS[kind](LINES) * 2)) == TEXTS * 2


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "foreign"])
@pytest.mark.parametrize("kind", COMPRESS)
def test_a_corrupt_compressed_file_is_named_with_the_last_valid_line(write, kind, damage):
    whole = COMPRESS[kind](LINES)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 8]) + whole[middle + 8 :]
    content = {"truncated": whole[:middle], "corrupt": flipped, "foreign": LINES}[damage]
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}(:| )") as caught:
        texts_of(write(f"a.jsonl.{kind}", content))
    if (kind, damage) == ("gz", "truncated"):
        assert re.search(r"a\.jsonl\.gz: corrupt after line [1-9]", str(caught.value))


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("damage", ["garbage", "damaged stream", "truncated stream", "part of a header", "empty"])
def test_what_follows_a_compressed_stream_is_read_or_an_error(write, kind, damage):
    one = COMPRESS[kind](LINES)
    behind = {
        "garbage": b"garbage behind",
        "damaged stream": bytes(byte ^ 0x55 for byte in one[:4]) + one[4:],
        "truncated stream": one[:-1],
        "part of a header": one[:3],
    }
    content = b"" if damage == "empty" else one * 2 + behind[damage]
    line = "0" if damage == "empty" else "[1-9]"
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}: corrupt after line {line}"):
        texts_of(write(f"a.jsonl.{kind}", content))


def test_empty_and_skippable_streams_and_padding_are_part_of_a_compressed_file(write):
    for kind, compress in COMPRESS.items():
        assert texts_of(write(f"a.jsonl.{kind}", compress(b"") + compress(LINES) + compress(b""))) == TEXTS
        padding = b"" if kind == "zst" else bytes(512)
        assert texts_of(write(f"b.jsonl.{kind}", (compress(LINES) + padding) * 2)) == TEXTS * 2
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"other"
    assert texts_of(write("c.jsonl.zst", skippable + zstandard.compress(LINES) + skippable)) == TEXTS


def test_a_long_window_of_zstd_is_named_with_the_command_that_removes_it(write):
    long = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=long).compressobj()
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: compressed with --long: .*zstd"):
        texts_of(write("a.jsonl.zst", stream.compress(LINES) + stream.flush()))


@pytest.mark.parametrize(
    "content",
    [
        b'{"text":"a"}\n{"text":"b"}',
        b'\n{"text":"a"}\r\n  \r\n{"text":"b"}\r\n',
        b'\xef\xbb\xbf{"text":"a"}\n{"text":"b"}',
    ],
    ids=["no last newline", "blank lines and carriage returns", "byte order mark"],
)
def test_line_ends_and_blank_lines_do_not_matter(write, content):
    assert texts_of(write("a.jsonl", content)) == ["a", "b"]


def test_line_separators_inside_a_text_do_not_split_it(write):
    path = write("a.jsonl", json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False).encode())
    assert texts_of(path) == ["a\u2028b\x85c"]


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_position_ends_at_the_size_of_the_file(write, kind):
    content = gzip.compress(LINES) if kind else LINES
    reader = DocumentReader(describe_source(write(f"a.jsonl{kind}", content)), Texts("text"))
    assert reader.position == 0
    positions = [reader.position for _ in reader]
    assert positions == sorted(positions)
    assert positions[0] > 0
    assert reader.position == len(content)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("part_bytes", [1, 7, 64, 100, 1000, 10**6])
def test_parts_of_any_size_give_every_document_once_in_order(write, part_bytes, end):
    file = write("a.jsonl", end.join(PARTED).encode())  # no line break at the end
    parts = split_source(describe_source(file), part_bytes)
    texts = [text for part in parts for _, text in DocumentReader(part, Texts("text"))]
    assert texts == [json.loads(line)["text"] for line in PARTED]
    assert sum(part.bytes for part in parts) == describe_source(file).bytes
    assert max(part.bytes for part in parts) <= max(part_bytes, 1) or len(parts) == 1


def test_a_bad_line_of_a_part_is_named_by_its_line_number_in_the_file(write):
    path = write("a.jsonl", "\n".join([*PARTED[:41], "{broken", *PARTED[41:]]).encode())
    parts = split_source(describe_source(path), 500)
    assert len(parts) > 5
    readers = [DocumentReader(part, Texts("text"), skip_bad=True) for part in parts]
    assert sum(1 for reader in readers for _ in reader) == 60
    (message,) = [line for reader in readers for line in reader.bad_records]
    assert message.startswith(f"{path}:42: not JSON")
    with pytest.raises(UserError, match=r"a\.jsonl:42: not JSON"):
        [list(DocumentReader(part, Texts("text"))) for part in parts]
