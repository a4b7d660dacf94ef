"""Durations with units: `90s`, `20m`, `2h`, `1d`, `1h30m`."""

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_duration(value: Any) -> timedelta:
    """`"1h30m"` -> 90 minutes. A number without a unit is an error: the unit would be a guess."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float) or (isinstance(value, str) and value.replace(".", "", 1).isdigit()):
        raise PydanticCustomError("duration", "a duration needs a unit, for example 15m; null turns it off")
    text = value.replace(" ", "") if isinstance(value, str) else ""
    parts = _PART.findall(text)
    units = [unit for _, unit in parts]
    if not parts or _PART.sub("", text) or units != [unit for unit in _SECONDS if unit in units]:
        raise PydanticCustomError("duration", "expected a duration such as 90s, 20m, 2h, 1d or 1h30m")
    try:
        return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))
    except OverflowError:
        raise PydanticCustomError("duration", "duration is too long; null turns it off") from None


def format_duration(value: timedelta) -> str:
    """Inverse of `parse_duration`: 5400 seconds -> `1h30m`."""
    rest = value.total_seconds()
    parts = []
    for unit in "dhm":
        count, rest = divmod(rest, _SECONDS[unit])
        if count:
            parts.append(f"{count:.0f}{unit}")
    if rest or not parts:
        text = f"{rest:.6f}".rstrip("0").rstrip(".")
        parts.append(f"{text}s")
    return "".join(parts)


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration, json_schema_input_type=str),
    PlainSerializer(format_duration, return_type=str),
]
