"""Every format gives the same documents; a bad record is an error with its location, and reading continues."""

import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from lmtrain.config.errors import UserError
from lmtrain.preprocess import formats
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.instructions import Completions
from lmtrain.preprocess.records import Texts, TokenIds
from lmtrain.preprocess.sources import describe_source

TEXTS = ["one", "zwei äöü 🙂", "", " three\t", 'quote " and \\ and ]', "a" * 5000]


ARRAY = "it looks like a JSON array: name the file .json"


def as_parquet(texts, key="text"):
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"n": list(range(len(texts))), key: texts}), file, row_group_size=2)
    return file.getvalue()


WRITTEN = {
    ".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    ".json lines": "\n\n".join(json.dumps({"text": text}) for text in TEXTS).encode(),
    ".json array": json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False).encode(),
    ".json array in one line": json.dumps([{"n": 1, "text": text} for text in TEXTS], separators=(",", ":")).encode(),
    ".parquet": as_parquet(TEXTS),
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
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100, 1 << 20])
def test_every_format_gives_the_same_texts(read, written, chunk, monkeypatch):
    """An array does not depend on the chunk size."""
    monkeypatch.setattr(formats, "_CHUNK_BYTES", chunk)
    assert [text for _, text in read(written.split()[0], WRITTEN[written])[0]] == TEXTS


def test_a_line_of_plain_text_is_a_document_with_the_number_of_its_line(read):
    found, _ = read(".txt", "eins\n\n  \n zwei ü \r\nlast".encode())
    assert found == [(1, "eins"), (4, " zwei ü "), (5, "last")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}', [(1, "a")]),
        (b'{\n "text": "a",\n "b": [1]\n}\n', [(1, "a")]),
        (b'\n\n{"text": "a"}\n{"text": "b"}\n', [(1, "a"), (2, "b")]),
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
        (".jsonl", b'[{"text": "a"}]\n', [f"1: expected a JSON object with the key 'text'; {ARRAY}"], []),
        (".jsonl", b'[\n{"text": "a"}\n]\n', [f"1: not JSON: Expecting value: character 2; {ARRAY}", "3:"], ["a"]),
        (".jsonl", b'{"text": "a" "b"}\n', ["1: not JSON: Expecting ',' delimiter: character 14"], []),
        (".jsonl", b"[" * 100_000 + b'\n{"text": "a"}\n', ["1: not JSON: nested too deeply"], ["a"]),
        (".json", b'{"text":' * 100_000, ["1: not JSON: nested too deeply"], []),
        (".json", b'{"text": \n\n  3 4}', ["1: not JSON: Expecting ',' delimiter: line 3, column 5"], []),
        (".jsonl", b'{"text": "\\ud800"}\n', ["1: not UTF-8"], []),
        (".txt", b"a\n\xff\xfe\nb\n", ["2: not UTF-8"], ["a", "b"]),
        (".json", b'[{"text": "a"}, {"t": 1}, 5, {"text": "b"}]', ["2: no key 'text'", "3: exp"], ["a", "b"]),
        (".json", b'{"t":\n 1}', ["1: no key 'text'"], []),
        (".json", b'{"text":\n', ["1: not JSON"], []),
        (".parquet", as_parquet(["a", None, "b"]), ["2: 'text' is NoneType, not text"], ["a", "b"]),
    ],
)
def test_a_bad_record_is_an_error_with_its_location_and_the_rest_is_read(read, extension, content, errors, kept):
    documents, found = read(extension, content)
    assert [text for _, text in documents] == kept
    assert len(found) == len(errors)
    for text, error in zip(found, errors, strict=True):
        assert text.startswith(f"name{extension}:{error}")


@pytest.mark.parametrize(
    ("extension", "content", "message"),
    [
        (".json", b'[{"text": "a"}, {"te', ":2: not JSON"),
        (".json", b'[{"text": "a"} {"text": "b"}', ":3: not JSON"),
        (".json", b'[{"text": "\xff"}]', ":1: not UTF-8"),
        (".json", b'[{"text": "a"}, {"text": ' + b"1" * 5000 + b"}]", ":2: not JSON: Exceeds the limit"),
        (".json", b'[{"text": "a"}, ' + b'{"text":' * 100_000, ":2: not JSON: nested too deeply"),
        (".parquet", b"PAR1 nonsense", ": corrupt, or not Parquet"),
        (".parquet", as_parquet(["a"], key="txt"), ": no key 'text' .it has 'n', 'txt'.; set data.text_key"),
        (".parquet", WRITTEN[".parquet"][:-20], ": corrupt, or not Parquet"),
    ],
)
def test_an_error_that_makes_the_rest_unreadable_is_raised(read, extension, content, message):
    with pytest.raises(UserError, match=f"^name{extension}{message}"):
        read(extension, content)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (TokenIds("ids", vocab_size=7), "a .txt holds text, but the passthrough tokenizer requires token ids"),
        (Completions("a", "b", ""), "a .txt holds text without fields; use .jsonl, or remove data.format"),
    ],
)
def test_a_txt_holds_texts_only(tmp_path, reader, message):
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(UserError, match=rf"a\.txt: {message}"):
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
        assert f"it looks like {name}: convert it with `iconv -f {name} -t UTF-8 OLD > NEW`" in errors[0]
