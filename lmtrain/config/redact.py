"""Removing secrets from what is logged or saved: passwords and signatures in URLs."""

import re
from typing import Any

# user:password@ after the scheme, and everything after the ? of a URL (signatures, tokens)
_PASSWORD = re.compile(r"(?<=://)[^/\s]+@")
_QUERY = re.compile(r"(://[^?\s]*)\?\S+")


def redact(value: Any) -> Any:
    """The same plain data, with secrets in its texts replaced by `***`."""
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _QUERY.sub(r"\1?***", _PASSWORD.sub("***@", value))
    return value
