"""Files that are not what they should be: text that is not UTF-8, and what was stored in the place of a file."""

import json
import os
import re
from typing import Any

from lmtrain.runtime.errors import UserError

# Marks at the start of a file, and what a file with them is.
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x7f]")
# Letters and signs of Windows' encoding where ISO-8859-1 has no characters.
_WINDOWS = re.compile(rb"[\x80-\x9f]")
_SHOWN_BYTES = 4096

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)\b", re.IGNORECASE)
# The first bytes of files that are no text, and the ends of their names.
_BINARY = {
    b"\x1f\x8b\x08": ".gz",
    b"BZh91AY&SY": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
}


def lfs_pointer(start: bytes) -> str | None:
    """Message for a file whose first bytes are those of a pointer of Git LFS; None for others."""
    if not start.startswith(_LFS_POINTER):
        return None
    return "a pointer of Git LFS, not the file itself; run `git lfs pull` in its repository to download the file"


def refuse_pointer(start: bytes, place: str) -> None:
    """Raise `UserError`, which starts with `place`, for the first bytes of a pointer of Git LFS."""
    if (reason := lfs_pointer(start)) is not None:
        raise UserError(f"{place}: {reason}")


def web_page(start: bytes) -> str | None:
    """Message for a file whose first bytes are those of a page in HTML or XML; None for others."""
    if not _MARKUP.match(start):
        return None
    return "a page in HTML or XML, such as an error of a web server, not the file itself; download the file again"


def binary_name(start: bytes) -> str | None:
    """The end of the name that files with these first bytes have, such as .gz; None if they may be text."""
    return next((name for mark, name in _BINARY.items() if start.startswith(mark)), None)


def likely_encoding(content: bytes) -> str | None:
    """Name for `iconv` of the encoding of text that is not UTF-8, from its first bytes; None if it is no text."""
    content = content[:_SHOWN_BYTES]
    for mark, name in _MARKS:
        if content.startswith(mark):
            return name
    zeros = [content[start::2].count(0) for start in (0, 1)]  # of Latin text in UTF-16, every second byte is zero
    if max(zeros) > len(content) // 4 > min(zeros):
        return "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE"
    if _CONTROL.search(content):
        return None
    return "WINDOWS-1252" if _WINDOWS.search(content) else "ISO-8859-1"


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong and what to do, for a message that starts with the place."""
    encoding = likely_encoding(error.object)
    reason = f"not UTF-8: {error.reason} at byte {error.start}"
    if encoding is None:
        return f"{reason}; it looks like binary data, not text"
    return f"{reason}; it looks like {encoding}: convert it with `iconv -f {encoding} -t UTF-8 OLD > NEW`"


def require_utf8(text: str, place: str) -> None:
    """Raise `UserError`, which starts with `place`, for text with bytes that Python could not decode.

    In arguments and in text that is read with `surrogateescape`, half a surrogate pair stands for each such byte.
    """
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: {not_utf8(error)}") from None


def require_utf8_name(path: str, advice: str) -> None:
    """Raise `UserError` for a path that is not UTF-8, which neither JSON files nor the libraries of tokens hold."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r}: a name that is not UTF-8; {advice}") from None


_START = 100  # characters in which a file can be recognized


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises `ValueError` with the place within the text; of a single line, the number of the character; or with what the
    file is instead. Bytes that are not in UTF-8 raise UnicodeDecodeError, which is one too.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        if pointer := lfs_pointer(error.doc[:_START].encode(errors="replace")):
            raise ValueError(pointer) from None
        text = error.doc.rstrip()
        place = f"character {min(error.pos, len(text)) + 1}"
        if "\n" in text:
            place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{error.msg}: {place}") from None
