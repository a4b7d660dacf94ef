"""Encodings of text that is not UTF-8, as `iconv` names them."""

import os
import subprocess

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.text import likely_encoding, not_utf8, require_utf8

TEXT = "caf\u00e9 d\u00e9j\u00e0 vu"


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
        ("latin-1", "ISO-8859-1"),
    ],
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
    assert not_utf8(caught.value) == (
        "not UTF-8: invalid continuation byte at byte 3; it looks like ISO-8859-1: convert it with "
        "`iconv -f ISO-8859-1 -t UTF-8 OLD > NEW`"
    )


def test_an_argument_with_bytes_that_are_not_utf8_is_refused():
    require_utf8(TEXT, "--prompt")
    argument = os.fsdecode(TEXT.encode("latin-1"))
    with pytest.raises(UserError, match=r"^--prompt: not UTF-8: invalid continuation byte at byte 3; .*ISO-8859-1"):
        require_utf8(argument, "--prompt")
