"""JSON in files that others wrote."""

import json
from typing import Any

from lmtrain.config.encodings import lfs_pointer

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
