"""Durations: parsing, invalid values, formatting, round trip."""

from datetime import timedelta

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtrain.config.section import Duration, Section, format_duration, parse_duration


class Timed(Section):
    every: Duration | None = timedelta(minutes=15)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("1h30m", 5400),
        ("1d2h3m4s", 86400 + 7200 + 180 + 4),
        (" 1h 30m ", 5400),
        ("1.5h", 5400),
        ("0.5s", 0.5),
        ("0s", 0),
    ],
)
def test_valid_durations_are_parsed(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("value", [15, 1.5, "15", "1.5", True])
def test_a_number_without_unit_is_refused_with_an_example(value):
    with pytest.raises(PydanticCustomError, match="needs a unit, for example 15m"):
        parse_duration(value)


@pytest.mark.parametrize("value", ["", " ", "m", "-5m", "5 minutes", "30m1h", "1h1h", "1e3s", "5M", None, [], {"m": 5}])
def test_anything_else_is_refused_with_examples(value):
    with pytest.raises(PydanticCustomError, match="expected a duration such as 90s, 20m"):
        parse_duration(value)


def test_a_duration_that_is_too_long_is_a_validation_error():
    with pytest.raises(ValidationError):
        Timed(every="99999999999999d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (900, "15m"), (86400, "1d"), (90061.5, "1d1h1m1.5s"), (0.25, "0.25s")],
)
def test_a_duration_is_formatted_in_the_largest_units(seconds, text):
    assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize("text", ["90s", "1d2h3m4s", "1.5h", "0.5s", "0s", "1000d", "0.1s", "12.345678s"])
def test_a_formatted_duration_parses_to_the_same_value(text):
    value = parse_duration(text)
    assert parse_duration(format_duration(value)) == value


def test_in_a_section_it_is_dumped_as_text_and_null_stays_null():
    assert Timed(every="1h30m").model_dump(mode="json") == {"every": "1h30m"}
    assert Timed(every=None).model_dump(mode="json") == {"every": None}
