"""Text and JSON: encodings other than UTF-8, and errors with their place."""

import os
import re
import subprocess

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.text import likely_encoding, not_utf8, parse_json, require_utf8

TEXT = "caf\u00e9 d\u00e9j\u00e0 vu"


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-16", "UTF-16"), ("utf-16-be", "UTF-16BE"), ("latin-1", "ISO-8859-1")]
)
def test_the_named_encoding_converts_the_text(tmp_path, encoding, name):
    (tmp_path / "old").write_bytes(TEXT.encode(encoding))
    assert likely_encoding(TEXT.encode(encoding)) == name
    done = subprocess.run(["iconv", "-f", name, "-t", "UTF-8", tmp_path / "old"], capture_output=True, check=True)
    assert done.stdout.decode() == TEXT


def test_quotes_of_windows_and_binary_data_are_distinguished():
    assert likely_encoding("\u201ccaf\u00e9\u201d".encode("cp1252")) == "WINDOWS-1252"
    assert likely_encoding(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR") is None
    assert likely_encoding(b"\x1f\x8b\x08\x00\x00") is None


def test_the_message_says_where_and_what_to_do():
    with pytest.raises(UnicodeDecodeError) as caught:
        TEXT.encode("latin-1").decode()
    assert "byte 3" in not_utf8(caught.value)
    assert "`iconv -f ISO-8859-1 -t UTF-8 OLD > NEW`" in not_utf8(caught.value)


def test_an_argument_with_bytes_that_are_not_utf8_is_refused():
    require_utf8(TEXT, "--prompt")
    argument = os.fsdecode(TEXT.encode("latin-1"))
    with pytest.raises(UserError, match=r"^--prompt: .*byte 3"):
        require_utf8(argument, "--prompt")


def test_values_are_those_of_json():
    assert parse_json(b'{"a": [1, 2.5, null, "\\u00e9"]}') == parse_json('{"a": [1, 2.5, null, "\u00e9"]}')
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a" 1}', "Expecting ':' delimiter: character 6"),
        ("", "Expecting value: character 1"),
        ('{"a": 1}{', "Extra data: character 9"),
        ('{"a":\n  x}', "Expecting value: line 2, column 3"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_the_place_is_the_character_or_in_several_lines_the_line(text, message):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            parse_json(content)
