"""JSON in files that others wrote."""

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises `ValueError` with the place within the text; of a single line, the number of the character. Bytes that are
    not in UTF-8 raise UnicodeDecodeError, which is one too.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        text = error.doc.rstrip()
        place = f"character {min(error.pos, len(text)) + 1}"
        if "\n" in text:
            place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{error.msg}: {place}") from None
