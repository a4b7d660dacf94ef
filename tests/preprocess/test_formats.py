"""Every format gives the same documents; a bad record is an error with its location, and reading continues."""

import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from lmtrain.config.errors import UserError
from lmtrain.preprocess import formats
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.text import Field

TEXTS = ["one", "zwei äöü 🙂", "", " three\t", 'quote " and \\ and ]', "a" * 5000]


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


def read(extension, content, key="text"):
    return list(READERS[extension](io.BytesIO(content), Field(key), "name"))


VERSES = "\ufeffFirst\r\n  second\n\n \n\nThird\n\tfourth\n\n".encode()


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("line", [(1, "First"), (2, "  second"), (6, "Third"), (7, "\tfourth")]),
        ("blank_line", [(1, "First\n  second"), (6, "Third\n\tfourth")]),
        ("file", [(1, "First\n  second\n\n \n\nThird\n\tfourth\n")]),
    ],
)
def test_a_txt_is_divided_by_text_documents_and_loses_its_byte_order_mark(documents, expected):
    assert list(READERS[".txt"](io.BytesIO(VERSES), Field("text", None, documents), "name")) == expected


@pytest.mark.parametrize("documents", ["blank_line", "file"])
def test_a_line_of_a_txt_that_is_not_utf8_is_an_error_and_the_rest_is_kept(documents):
    found = list(READERS[".txt"](io.BytesIO(b"a\n\xff\nb\n"), Field("text", None, documents), "name"))
    assert [str(text) for _, text in found] == ["name:2: not UTF-8: invalid start byte at byte 0", "a\nb"]


def test_an_empty_txt_has_no_document():
    for documents in ("line", "blank_line", "file"):
        for content in (b"", b"\n\n", b"  \n"):
            assert list(READERS[".txt"](io.BytesIO(content), Field("text", None, documents), "name")) == []


@pytest.mark.parametrize("written", WRITTEN)
def test_every_format_gives_the_same_texts(written):
    assert [text for _, text in read(written.split()[0], WRITTEN[written])] == TEXTS


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_an_array_does_not_depend_on_the_chunk_size(chunk, monkeypatch):
    monkeypatch.setattr(formats, "_CHUNK_BYTES", chunk)
    for written in (".json array", ".json array in one line"):
        assert [text for _, text in read(".json", WRITTEN[written])] == TEXTS


def test_a_line_of_plain_text_is_a_document_with_the_number_of_its_line():
    assert read(".txt", "eins\n\n  \n zwei ü \r\nlast".encode()) == [(1, "eins"), (4, " zwei ü "), (5, "last")]


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
def test_a_json_file_may_be_one_object_lines_or_an_array(content, expected):
    assert read(".json", content) == expected


@pytest.mark.parametrize(
    ("extension", "content", "errors", "kept"),
    [
        (".jsonl", b'{"text": "a"}\n{x\n{"text": "b"}\n', ["name:2: not JSON"], ["a", "b"]),
        (".jsonl", b'{"text": null}\n{"text": 3}\n[1]\n', ["name:1: 'text' is NoneType", "name:2:", "name:3: exp"], []),
        (".jsonl", b'\xff\n{"text": "a"}\n', ["name:1: not UTF-8"], ["a"]),
        (".jsonl", b'{"text": "\\ud800"}\n', ["name:1: not UTF-8"], []),
        (".txt", b"a\n\xff\xfe\nb\n", ["name:2: not UTF-8"], ["a", "b"]),
        (".json", b'[{"text": "a"}, {"t": 1}, 5, {"text": "b"}]', ["name:2: no key 'text'", "name:3: exp"], ["a", "b"]),
        (".json", b'{"t":\n 1}', ["name: no key 'text'"], []),
        (".json", b'{"text":\n', ["name: not JSON"], []),
        (".parquet", as_parquet(["a", None, "b"]), ["name:2: 'text' is NoneType, not text"], ["a", "b"]),
    ],
)
def test_a_bad_record_is_an_error_with_its_location_and_the_rest_is_read(extension, content, errors, kept):
    records = [text for _, text in read(extension, content)]
    assert [text for text in records if isinstance(text, str)] == kept
    found = [str(text) for text in records if isinstance(text, UserError)]
    assert len(found) == len(errors)
    assert all(text.startswith(error) for text, error in zip(found, errors, strict=True)), found


@pytest.mark.parametrize(
    ("extension", "content", "message"),
    [
        (".json", b'[{"text": "a"}, {"te', "name:2: not JSON"),
        (".json", b'[{"text": "a"} {"text": "b"}', "name:3: not JSON"),
        (".json", b'[{"text": "\xff"}]', "name:1: not UTF-8"),
        (".parquet", b"PAR1 nonsense", "name: corrupt, or not Parquet"),
        (".parquet", as_parquet(["a"], key="txt"), "name: no column 'text' .it has 'n', 'txt'.; set data.text_key"),
        (".parquet", WRITTEN[".parquet"][:-20], "name: corrupt, or not Parquet"),
    ],
)
def test_an_error_that_makes_the_rest_unreadable_is_raised(extension, content, message):
    with pytest.raises(UserError, match=message):
        read(extension, content)
