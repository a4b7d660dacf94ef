"""Numbers with their nouns."""

import pytest

from lmtrain.runtime.errors import counted


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [
        (0, ["step"], "0 steps"),
        (1, ["step"], "1 step"),
        (1000, ["step"], "1,000 steps"),
        (1, ["process", "processes"], "1 process"),
        (2, ["process", "processes"], "2 processes"),
    ],
)
def test_the_noun_has_the_number_of_its_count(number, words, expected):
    assert counted(number, *words) == expected
