"""Colours are readable on both backgrounds and distinct in a plot."""

import pytest

from lmtrain.report.charts import COLOURS, CURVES, TIMES, css_variables
from lmtrain.tracking.goodput import DOWN, KINDS, LOST


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_curves_and_text_have_contrast_to_the_paper(theme):
    paper = luminance(COLOURS["paper"][theme])
    for name, least in {"ink": 7, "soft": 4.5, "bad": 3, "restart": 3, **dict.fromkeys(CURVES, 3)}.items():
        lighter, darker = sorted([luminance(COLOURS[name][theme]), paper], reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= least, name


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_distinct_and_in_the_style_sheet(theme):
    colours = [pair[theme] for pair in COLOURS.values()]
    assert len(set(colours)) == len(colours)
    assert all(f"--{name}:{pair[theme]};" in css_variables(theme) for name, pair in COLOURS.items())


def test_every_kind_of_time_has_a_distinct_colour():
    assert set(TIMES) == {*KINDS, LOST, DOWN}
    assert len({colour for colour, _ in TIMES.values()}) == len(TIMES)
