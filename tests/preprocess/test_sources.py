"""Expansion of input files and reading of their documents."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

from lmtrain.config.errors import UserError
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.sources import FilesMissingError, describe_source, expand_urls

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
# varied enough that half of a compressed file has some documents
TEXTS = [f"document {i} äöü 🙂 {i * 7919 % 1000003:x}" for i in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def make(folder, *names, content=LINES):
    for name in names:
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in names]


def texts_of(path):
    return [text for _, text in DocumentReader(str(path), "text")]


def test_braces_expand_in_the_order_written_and_globs_in_sorted_order(tmp_path):
    b2, b10, a1, c = make(tmp_path, "b.2.jsonl", "b.10.jsonl", "a.1.jsonl", "c.jsonl")
    assert expand_urls([f"{tmp_path}/c.jsonl", f"{tmp_path}/b.{{2..10..8}}.jsonl", a1]) == [c, b2, b10, a1]
    assert expand_urls([f"{tmp_path}/{{b,a}}.*.jsonl"]) == [b10, b2, a1]


def test_every_missing_file_is_named_at_once(tmp_path):
    make(tmp_path, "a.1.jsonl")
    with pytest.raises(FilesMissingError) as error:
        expand_urls([f"{tmp_path}/a.{{1..3}}.jsonl", f"{tmp_path}/none*.jsonl"])
    missing = f"no such file: {tmp_path}/a.2.jsonl, {tmp_path}/a.3.jsonl, {tmp_path}/none*.jsonl"
    assert str(error.value) == missing


def test_a_file_listed_twice_is_refused(tmp_path):
    a, _ = make(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(UserError, match=r"more than once: .*a\.jsonl$"):
        expand_urls([a, f"{tmp_path}/*.jsonl"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.docx", "unsupported format"),
        ("a.parquet.gz", "unsupported format"),
        ("a.jsonl.lz4", "unsupported format"),
        ("a.gz", "unsupported format"),
        ("{a.jsonl", "braces"),
    ],
)
def test_an_unreadable_name_is_an_error_with_the_reason(tmp_path, name, message):
    make(tmp_path, name)
    with pytest.raises(UserError, match=message):
        expand_urls([f"{tmp_path}/{name}"])


def test_an_unknown_protocol_is_a_user_error():
    with pytest.raises(UserError, match=r"nonsense://a.jsonl"):
        expand_urls(["nonsense://a.jsonl"])


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
def test_a_folder_is_not_read_as_a_file(tmp_path, pattern):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match="jsonl"):
        [describe_source(url) for url in expand_urls([f"{tmp_path}/{pattern}"])]


def test_a_file_with_glob_characters_in_its_name_is_found(tmp_path):
    assert expand_urls(make(tmp_path, "part[1].jsonl")) == [f"{tmp_path}/part[1].jsonl"]


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_files_read_the_same_as_plain_ones(tmp_path, kind):
    (path,) = make(tmp_path, f"a.jsonl.{kind}", content=COMPRESS[kind](LINES))
    assert list(DocumentReader(path, "text")) == list(enumerate(TEXTS, start=1))


@pytest.mark.parametrize("kind", COMPRESS)
def test_concatenated_compressed_files_are_read_completely(tmp_path, kind):
    (path,) = make(tmp_path, f"a.jsonl.{kind}", content=COMPRESS[kind](LINES) + COMPRESS[kind](LINES))
    assert texts_of(path) == TEXTS + TEXTS


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "foreign"])
@pytest.mark.parametrize("kind", COMPRESS)
def test_a_corrupt_compressed_file_is_named(tmp_path, kind, damage):
    whole = COMPRESS[kind](LINES)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 8]) + whole[middle + 8 :]
    content = {"truncated": whole[:middle], "corrupt": flipped, "foreign": LINES}[damage]
    (path,) = make(tmp_path, f"a.jsonl.{kind}", content=content)
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}(:| )"):
        texts_of(path)


def test_a_truncated_gzip_is_an_error_with_the_last_valid_line(tmp_path):
    whole = gzip.compress(LINES)
    (path,) = make(tmp_path, "a.jsonl.gz", content=whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: corrupt after line [1-9]\d*"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 1}", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 10"),
        (b'["text"]', "expected a JSON object with the key 'text'"),
        (b'"text"', "expected a JSON object with the key 'text'"),
        (b'{"body": "a", "id": 1}', r"no key 'text' \(it has 'body', 'id'\); set data.text_key"),
        (b"{}", r"no key 'text' \(it has none\)"),
        (b'{"text": null}', "'text' is NoneType, not text"),
        (b'{"text": ["a"]}', "'text' is list, not text"),
        (b'{"text": "half \\ud83d"}', ""),  # half of a surrogate pair, which has no encoding
        (b'{"text": "\xed\xa0\x80"}', ""),
        (b'{"text": ' + b"[" * 200_000 + b"}", ""),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_a_bad_line_is_named_with_its_line_number(tmp_path, line, message):
    (path,) = make(tmp_path, "a.jsonl", content=b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:3: .*{message}"):
        texts_of(path)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text":"a"}\n{"text":"b"}',
        b'\n{"text":"a"}\r\n  \r\n{"text":"b"}\r\n',
        b'\xef\xbb\xbf{"text":"a"}\n{"text":"b"}',
    ],
    ids=["no last newline", "blank lines and carriage returns", "byte order mark"],
)
def test_line_ends_and_blank_lines_do_not_matter(tmp_path, content):
    assert texts_of(make(tmp_path, "a.jsonl", content=content)[0]) == ["a", "b"]


def test_line_separators_inside_a_text_do_not_split_it(tmp_path):
    (path,) = make(tmp_path, "a.jsonl", content=json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False).encode())
    assert texts_of(path) == ["a\u2028b\x85c"]


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_position_ends_at_the_size_of_the_file(tmp_path, kind):
    content = gzip.compress(LINES) if kind else LINES
    reader = DocumentReader(make(tmp_path, f"a.jsonl{kind}", content=content)[0], "text")
    assert reader.position == 0
    positions = [reader.position for _ in reader]
    assert positions == sorted(positions)
    assert positions[0] > 0
    assert reader.position == len(content)


@pytest.mark.parametrize("place", [0, 4095, 400_000, -4096, -1], ids=str)
def test_fingerprint_detects_a_change_at_either_end(tmp_path, place):
    # `place` in the middle is not read: such a change is detected by its size only
    content = bytearray(b"x" * 500_000)
    before = describe_source(make(tmp_path, "a.jsonl", content=bytes(content))[0])
    content[place] = ord("y")
    after = describe_source(make(tmp_path, "a.jsonl", content=bytes(content))[0])
    assert (before.fingerprint == after.fingerprint) == (place == 400_000)
    assert before.bytes == after.bytes == 500_000


def test_fingerprint_detects_another_size_and_is_equal_for_equal_content(tmp_path):
    first, second = map(describe_source, make(tmp_path, "a.jsonl", "b.jsonl"))
    assert first.fingerprint == second.fingerprint
    half = len(LINES) // 2
    (path,) = make(tmp_path, "a.jsonl", content=LINES[:half] + b"\n" + LINES[half:])
    assert describe_source(path).fingerprint != second.fingerprint
