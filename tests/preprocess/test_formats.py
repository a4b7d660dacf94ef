"""Every format gives the same documents; a bad record is an error with its location, and reading continues."""

import bz2
import gzip
import io
import json
import re
import tracemalloc

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from lmtrain.preprocess import formats
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.formats import RecordLimit
from lmtrain.preprocess.instructions import Completions
from lmtrain.preprocess.records import Texts, TokenIds
from lmtrain.preprocess.sources import describe_source
from lmtrain.runtime.errors import UserError

TEXTS = ["one", "zwei äöü 🙂", "", " three\t", 'quote " and \\ and ]', "a" * 5000]


def table(texts, key, other):
    return pyarrow.table([list(range(len(texts))), texts], names=[other, key])


def as_parquet(texts, key="text", other="n"):
    file = io.BytesIO()
    parquet.write_table(table(texts, key, other), file, row_group_size=2)
    return file.getvalue()


def as_arrow(texts, key="text", other="n"):
    file, content = io.BytesIO(), table(texts, key, other)
    with pyarrow.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content)
    return file.getvalue()


WRITTEN = {
    ".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    ".json lines": "\n\n".join(json.dumps({"text": text}) for text in TEXTS).encode(),
    ".json array": json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False).encode(),
    ".json array in one line": json.dumps([{"n": 1, "text": text} for text in TEXTS], separators=(",", ":")).encode(),
    ".parquet": as_parquet(TEXTS),
    ".arrow": as_arrow(TEXTS),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The documents of a file `name` with an extension, with their numbers, and what is wrong with the others."""
    monkeypatch.chdir(tmp_path)

    def documents(extension, content, text_documents="line"):
        (tmp_path / f"name{extension}").write_bytes(content)
        reader = DocumentReader(describe_source(f"name{extension}"), Texts("text", text_documents), skip_bad=True)
        return list(reader), reader.bad_records

    return documents


@pytest.mark.parametrize(
    "array",
    ['["a", 1.5e-3, -0, true, null, {"a": [1, {"b": "\\u00e9\\n"}]}, [], {}, "\\ud83d\\ude42", -Infinity]', "[17]"],
)
@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_an_array_is_read_if_it_is_json_and_every_prefix_of_it_is_refused(array, chunk, monkeypatch):
    monkeypatch.setattr(formats, "_CHUNK_BYTES", chunk)

    def items(text):
        return [item for _, item in formats.read_json(io.BytesIO(text.encode()), Texts("text"), RecordLimit())]

    assert items(array) == json.loads(array)
    for end in range(1, len(array)):
        with pytest.raises(formats.UnreadableError, match="not JSON"):
            items(array[:end])


LINE = b"x" * 4095 + b"\n"
LONG = b'{"text": "' + b"x" * (1 << 24) + b'"}'


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("a.jsonl.zst", b'{"text": "a"}\n' + LONG + b'\n{"text": "b"}\n', ["a", "b"]),
        ("a.json.gz", b'{"text": "a"}\n' + LONG + b'\n{"text": "b"}\n', ["a", "b"]),
        ("a.txt.bz2", b"a\n" + LONG + b"\nb\n", ["a", "b"]),
        ("a.txt", b"a\n" + LONG, ["a"]),
        ("block.txt", b"a\n\n" + LINE * (1 << 13) + b"\nb\n", ["a", "b"]),
        ("file.txt", b"a\n\n" + LINE * (1 << 13), []),
        ("a.json", b'[{"text": "a"}, ' + LONG + b"]", None),
        ("object.json", b"{\n" + LONG[1:], None),
    ],
)
def test_a_record_above_a_multiple_of_max_document_bytes_is_not_held_in_memory(tmp_path, name, content, kept):
    compress = {"zst": zstandard.compress, "gz": gzip.compress, "bz2": bz2.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(compress(content))
    unit = {"block.txt": "blank_line", "file.txt": "file"}.get(name, "line")
    reader = DocumentReader(describe_source(str(tmp_path / name)), Texts("text", unit), True, max_document_bytes=1000)
    place, rule = str(tmp_path / name), r"of more than 1,048,576 bytes is too long for data\.max_document_bytes 1,000"
    tracemalloc.start()
    try:
        if kept is None:
            with pytest.raises(UserError, match=rf":[12]: a record {rule}"):
                list(reader)
        else:
            assert [text for _, text in reader] == kept
            (error,) = reader.bad_records
            number = {"file.txt": 1, "block.txt": 3}.get(name, 2)
            assert error.startswith(f"{place}:{number}: a record")
            assert re.search(rule, error)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("write", "most"), [(as_parquet, 1 << 23), (as_arrow, 3 << 23)])
def test_few_large_rows_are_held_at_once(tmp_path, write, most):
    """Of .arrow in addition to its batch, here the entire file."""
    path = tmp_path / f"a.{write.__name__.removeprefix('as_')}"
    path.write_bytes(write([f"{i}" + "x" * (1 << 18) for i in range(64)]))
    reader = DocumentReader(describe_source(str(path)), Texts("text"), max_document_bytes=1000)
    tracemalloc.start()
    try:
        assert sum(len(text) for _, text in reader) > 1 << 24
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


VERSES = "\ufeffFirst\r\n  second\n\n \n\nThird\n\tfourth\n\n".encode()


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("line", [(1, "First"), (2, "  second"), (6, "Third"), (7, "\tfourth")]),
        ("blank_line", [(1, "First\n  second"), (6, "Third\n\tfourth")]),
        ("file", [(1, "First\n  second\n\n \n\nThird\n\tfourth\n")]),
    ],
)
def test_a_txt_is_divided_by_text_documents_and_loses_its_byte_order_mark(read, documents, expected):
    assert read(".txt", VERSES, documents) == (expected, [])
    for content in (b"", b"\n\n", b"  \n"):
        assert read(".txt", content, documents) == ([], [])


@pytest.mark.parametrize("documents", ["blank_line", "file"])
def test_a_line_of_a_txt_that_is_not_utf8_is_an_error_and_the_rest_is_kept(read, documents):
    found, (error,) = read(".txt", b"a\n\xff\nb\n", documents)
    assert error.startswith("name.txt:2: not UTF-8: invalid start byte at byte 0; it looks like ISO-8859-1: ")
    assert [text for _, text in found] == ["a\nb"]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_every_format_gives_the_same_texts(read, written, chunk, monkeypatch):
    """An array does not depend on the chunk size."""
    monkeypatch.setattr(formats, "_CHUNK_BYTES", chunk)
    assert [text for _, text in read(written.split()[0], WRITTEN[written])[0]] == TEXTS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}', [(1, "a")]),
        (b'{\n "text": "a",\n "b": [1]\n}\n', [(1, "a")]),
        (b'\n\n{"text": "a"}\n\n{"text": "b"}\n', [(3, "a"), (5, "b")]),
        (b'{"text": "a"}{"text":\n "b"}\n{\n"text": "c"}', [(1, "a"), (2, "b"), (3, "c")]),
        (b'[{"text": "a"}]\n[{"text": "b"},{"text": "c"}]', [(1, "a"), (2, "b"), (3, "c")]),
        (b'[{"text": "a"}]\n\n{"text": "b"}\n{"text": "c"}', [(1, "a"), (2, "b"), (3, "c")]),
        (b"[][\n]", []),
        (b'\xef\xbb\xbf[{"text": "a"}]', [(1, "a")]),
        (b'\xef\xbb\xbf\r\n [\r\n{"text": "a"}\r\n]\r\n', [(1, "a")]),
        (b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}', [(1, "a"), (2, "b")]),
        (b'\xef\xbb\xbf{\n"text": "a"\n}', [(1, "a")]),
        (b"[]", []),
        (b" \n [ \n ] ", []),
        (b"", []),
        (b"\n\n", []),
    ],
)
def test_a_json_file_may_be_one_object_lines_or_an_array(read, content, expected):
    assert read(".json", content) == (expected, [])


@pytest.mark.parametrize(
    ("extension", "content", "errors", "kept"),
    [
        (".jsonl", b'{"text": "a"}\n{x\n{"text": "b"}\n', ["2: not JSON"], ["a", "b"]),
        (".jsonl", b'{"text": null}\n{"text": 3}\n[1]\n', ["1: 'text' is NoneType", "2:", "3: exp"], []),
        (".jsonl", b'\xff\n{"text": "a"}\n', ["1: not UTF-8"], ["a"]),
        (".jsonl", b'{"text":\n', ["1: not JSON: Expecting value: character 9"], []),
        (".jsonl", b'[{"text": "a"}]\n', ["1: exp"], []),
        (".jsonl", b'[\n{"text": "a"}\n]\n', ["1: not JSON", "3:"], ["a"]),
        (".jsonl", b'{"text": "a" "b"}\n', ["1: not JSON: Expecting ',' delimiter: character 14"], []),
        (".jsonl", b"[" * 100_000 + b'\n{"text": "a"}\n', ["1: not JSON: nested too deeply"], ["a"]),
        (".jsonl", b'{"text": "\\ud800"}\n', ["1: not UTF-8"], []),
        (".txt", b"a\n\xff\xfe\nb\n", ["2: not UTF-8"], ["a", "b"]),
        (".txt", b"a\nb\n" + bytes(50), ["3: 50 zero bytes"], ["a", "b"]),
        (".txt", b"a\rb\r", ["1: lines end in CR"], []),
        (".json", b'[{"text": "a"}, {"t": 1}, 5, {"text": "b"}]', ["2: no key 'text'", "3: exp"], ["a", "b"]),
        (".json", b'{"t":\n 1}', ["1: no key 'text'"], []),
        (".json", b'{"text": "a"}\n[{"text": "b"}]\n', ["2: expected a JSON object with the key 'text'"], ["a"]),
        (".json", b'[{"text": "a"}]5[[{"text": "b"}]]', ["2: expected a JSON obj", "3: exp"], ["a"]),
        (".parquet", as_parquet(["a", None, "b"]), ["2: 'text' is NoneType, not text"], ["a", "b"]),
    ],
)
def test_a_bad_record_is_an_error_with_its_location_and_the_rest_is_read(read, extension, content, errors, kept):
    documents, found = read(extension, content)
    assert [text for _, text in documents] == kept
    assert len(found) == len(errors)
    for text, error in zip(found, errors, strict=True):
        assert text.startswith(f"name{extension}:{error}")


WRONG = [b"", b"\n", b"]]", b',{"te', b",]", b',,{"text": "b"}]', b'],[{"text": "b"}]']


@pytest.mark.parametrize(
    ("extension", "content", "message"),
    [
        (".json", b'{"text":' * 100_000, ":1: not JSON: nested too deeply"),
        (".json", b'{"text": \n\n  3 4}', ":1: not JSON: Expecting ',' delimiter: line 3, column 5"),
        (".json", b'{"text":\n', ":1: not JSON"),
        (".json", b'[{"text": "a"}\n\n {"text": "b"}]', ":2: not JSON: Expecting ',' delimiter: line 3, column 2"),
        *((".json", b'[{"text": "a"}' + rest, ":2: not JSON") for rest in WRONG),
        (".json", b'[,{"text": "a"}]', ":1: not JSON: Expecting value: line 1, column 2"),
        (".json", b'[{"text": "a"}] this is no JSON', ":2: not JSON: Expecting value: line 1, column 17"),
        (".json", '[\n{"text": "a"}]'.encode("utf-16-le"), ":1: not UTF-8: a zero byte, as in UTF-16LE, .*iconv"),
        (".json", b'[{"text": "\xff"}]', ":1: not UTF-8"),
        (".json", b'[{"text": "a"}, {"text": ' + b"1" * 5000 + b"}]", ":2: not JSON: Exceeds the limit"),
        (".json", b'[{"text": "a"}, ' + b'{"text":' * 100_000, ":2: not JSON: nested too deeply"),
        (".parquet", b"PAR1 nonsense", ": corrupt, or not Parquet"),
        (".parquet", as_parquet(["a"], key="txt"), ": no key 'text' .it has 'n', 'txt'.; set data.text_key"),
        (".parquet", WRITTEN[".parquet"][:-20], ": corrupt, or not Parquet"),
        (".parquet", WRITTEN[".parquet"] + as_parquet(["c"]), ": several Parquet files in one"),
        (".parquet", as_parquet(["c"]) + WRITTEN[".parquet"], ": several Parquet files in one"),
        (".arrow", as_arrow(["a"]) + as_arrow(["b"]), ": more bytes after the end"),
        (".parquet", as_parquet(["a"], key="text", other="text"), ": 2 columns have the name 'text'"),
        (".arrow", as_arrow(["a"], "text", "text"), ": 2 columns have the name 'text'"),
    ],
)
def test_an_error_that_makes_the_rest_unreadable_is_raised(read, extension, content, message):
    with pytest.raises(UserError, match=f"^name{extension}{message}"):
        read(extension, content)


@pytest.mark.parametrize(
    "reader",
    [TokenIds(key="ids", vocab_size=7), Completions(input_field="a", output_field="b", separate_with="")],
    ids=["ids", "completions"],
)
def test_a_txt_holds_texts_only(tmp_path, reader):
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(UserError, match=r"a\.txt: .*\.txt"):
        list(DocumentReader(describe_source(str(tmp_path / "a.txt")), reader))


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
        ("latin-1", "ISO-8859-1"),
        ("cp1252", "WINDOWS-1252"),
    ],
)
@pytest.mark.parametrize("extension", [".txt", ".jsonl"])
def test_another_encoding_is_named_with_the_command_that_converts_it(read, extension, encoding, name):
    text = "the café of the robot" + ("“”" if encoding == "cp1252" else "")
    content = f"{text}\n{text}\n" if extension == ".txt" else f'{{"text": "{text}"}}\n' * 2
    documents, errors = read(extension, content.encode(encoding))
    if (extension, encoding) == (".jsonl", "utf-16-be"):
        # one line of it ends where the line ends, and JSON may be in UTF-16
        assert documents[0] == (1, text)
    else:
        assert errors[0].startswith(f"name{extension}:1: not UTF-8: ")
        assert f"iconv -f {name} -t UTF-8" in errors[0]
