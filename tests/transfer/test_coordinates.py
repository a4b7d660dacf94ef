"""The coordinate check: with transfer, ten steps change the logits as much at every width. tools/bench/coordinates.py
prints all families and optimizers."""

import pytest
from transfer.coordinates import MODELS, rate_of, slope

WIDTHS = (64, 256)


def slopes(name, optimizer):
    """Without and with transfer."""
    family, model = MODELS[name]
    rate = rate_of(family, optimizer)
    return [slope(family, {"type": optimizer}, rate, each, WIDTHS, **model) for each in (False, True)]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("llama", "adam"),
        pytest.param("mixture", "lion", marks=pytest.mark.long),
    ],
)
def test_the_change_of_the_logits_does_not_grow_with_the_width(name, optimizer):
    standard, transferred = slopes(name, optimizer)
    assert standard > 0.4
    assert abs(transferred) < 0.15
