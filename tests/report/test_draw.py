"""What is drawn in a plot: restarts, gaps, notes, labels."""

import numpy as np
import pytest

from lmtrain.report.charts import light
from lmtrain.report.curve import thin
from lmtrain.report.draw import draw, to_png
from lmtrain.report.plots import Line, Plot

STEPS = np.arange(1, 1001)
NOISY = 3 + np.random.default_rng(0).normal(0, 0.2, 1000)


def plot(*columns, **settings) -> Plot:
    lines = [
        Line(label=f"line {number}", curve=thin(STEPS[: len(each)], each), number=number)
        for number, each in enumerate(columns)
    ]
    return Plot(**{"name": "p", "title": "Title", "unit": "nats", "lines": lines, "last_step": 1000, **settings})


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_highest_value_is_noted_if_it_is_above_the_plot():
    axes = draw(plot(np.concatenate([[123.5], NOISY[1:]]))).axes[0]
    assert axes.get_ylim()[1] < 10
    assert axes.get_title("right") == "▲ 123.5 at step 1"
    assert draw(plot(STEPS / 1000)).axes[0].get_title("right") == ""


@pytest.mark.parametrize(
    ("columns", "restarts", "colour"),
    [([NOISY], [(300, None), (700, None)], "restart"), ([NOISY, NOISY], [(300, 1), (700, 1)], "c1")],
)
def test_restarts_are_thin_lines_at_their_steps(columns, restarts, colour):
    figure = draw(plot(*columns, restarts=restarts))
    marks = [line for line in figure.axes[0].get_lines() if len(set(line.get_xdata())) == 1]
    assert [(line.get_xdata()[0], line.get_color()) for line in marks] == [(300, light(colour)), (700, light(colour))]
    assert legend(figure) == (["restart"] if colour == "restart" else ["line 0", "line 1"])


def test_nan_is_a_gap_and_a_cross():
    values = STEPS / 1000
    values[400:600] = np.nan
    figure = draw(plot(values))
    assert np.isnan(figure.axes[0].get_lines()[0].get_ydata()).sum() == 200
    assert legend(figure) == ["NaN or infinite (200)"]


@pytest.mark.parametrize("label", [r"$\frac{$", "_hidden", "名前", "x" * 500, "<b>&\"'"])
def test_labels_are_not_interpreted(label, recwarn):
    lines = [
        Line(label=label, curve=thin(STEPS, NOISY), number=0),
        Line(label="other", curve=thin(STEPS, NOISY), number=1),
    ]
    figure = draw(plot(lines=lines, title=label))
    to_png(figure)
    assert len(legend(figure)) == 2
    assert not recwarn.list
