"""JSON: errors with the place in the text, whatever the text is."""

import re

import pytest

from lmtrain.runtime.text import parse_json


def test_values_are_those_of_json():
    assert parse_json(b'{"a": [1, 2.5, null, "\\u00e9"]}') == parse_json('{"a": [1, 2.5, null, "\u00e9"]}')
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a" 1}', "Expecting ':' delimiter: character 6"),
        ('{"a":\n', "Expecting value: character 6"),
        ("", "Expecting value: character 1"),
        ('{"a": 1}{', "Extra data: character 9"),
        ('{"a":\n  x}', "Expecting value: line 2, column 3"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_the_place_is_the_character_or_in_several_lines_the_line(text, message):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            parse_json(content)
