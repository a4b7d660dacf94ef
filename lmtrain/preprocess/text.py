"""What a document must be, whatever it was read from."""

import json
from typing import Any

from lmtrain.config.errors import UserError

# A record's text; or the error it would be, as a value: what to do about it is decided by whoever reads records.
Text = str | UserError
Record = tuple[int, Text]


def text_of(document: Any, key: str, place: str) -> Text:
    """The text of a document; errors begin with `place`."""
    if not isinstance(document, dict):
        return UserError(f"{place}: expected a JSON object with the key {key!r}")
    if key not in document:
        keys = ", ".join(map(repr, list(document)[:8])) or "none"
        return UserError(f"{place}: no key {key!r} (it has {keys}); data.text_key names the key")
    text = document[key]
    if not isinstance(text, str):
        return UserError(f"{place}: {key!r} is {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            return UserError(f"{place}: not UTF-8: {error.reason} at character {error.start}")
    return text


def text_of_json(content: bytes, key: str, place: str) -> Text:
    """The text of a document written as JSON."""
    try:
        return text_of(json.loads(content), key, place)
    except UnicodeDecodeError as error:
        return UserError(f"{place}: not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return UserError(f"{place}: not JSON: {error}")
