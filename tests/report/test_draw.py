"""Plots: curves are visible, and at the place of their values."""

import re
import sys

import numpy as np
import pytest
from report.made import Page, pixels
from report.test_curve import thin

from lmtrain.report.draw import Line, Plot, draw, draw_times
from lmtrain.report.picture import to_png, to_svg
from lmtrain.report.theme import COLOURS, light

STEPS = np.arange(1, 1001)
NOISY = 3 + np.random.default_rng(0).normal(0, 0.2, 1000)


def plot(*curves, **settings) -> Plot:
    lines = [Line(f"line {number}", curve, number) for number, curve in enumerate(curves)]
    return Plot(**{"name": "p", "title": "Title", "unit": "nats", "lines": lines, "last_step": 1000, **settings})


def curve(values, steps=STEPS):
    return thin(list(steps), list(values))


def count(tmp_path, figure, colour: str) -> int:
    path = tmp_path / "p.png"
    path.write_bytes(to_png(figure))
    return pixels(path, light(colour))


def test_a_curve_is_drawn_in_its_colour_and_no_other(tmp_path):
    figure = draw(plot(curve(NOISY), wide=True))
    assert count(tmp_path, figure, "c0") > 1000
    assert count(tmp_path, figure, "c1") == 0
    assert count(tmp_path, draw(plot(curve(NOISY), curve(NOISY + 1))), "c1") > 1000


def test_only_a_noisy_curve_is_faint_under_a_smoothed_one():
    def lines(figure):
        return [(line.get_alpha(), len(line.get_xdata())) for line in figure.axes[0].get_lines()]

    assert lines(draw(plot(curve(NOISY)))) == [(0.25, 1000), (None, 1000)]
    assert lines(draw(plot(curve(NOISY), faint=False))) == [(None, 1000)]
    assert lines(draw(plot(curve(STEPS / 1000)))) == [(None, 1000)]


def test_the_highest_value_is_noted_if_it_is_above_the_plot():
    values = NOISY.copy()
    values[0] = 123.5
    axes = draw(plot(curve(values))).axes[0]
    assert axes.get_ylim()[1] < 10
    assert axes.get_title("right") == "▲ 123.5 at step 1"
    assert draw(plot(curve(STEPS / 1000))).axes[0].get_title("right") == ""


def test_restarts_are_thin_lines_at_their_steps(tmp_path):
    def marks(figure):
        lines = [line for line in figure.axes[0].get_lines() if str(line.get_gid()).startswith("restart-")]
        return [(line.get_xdata()[0], line.get_color()) for line in lines]

    figure = draw(plot(curve(NOISY), restarts=[(300, None), (700, None)]))
    assert marks(figure) == [(300, light("restart")), (700, light("restart"))]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["restart"]
    figure = draw(plot(curve(NOISY), curve(NOISY), restarts=[(300, 1)]))
    assert marks(figure) == [(300, light("c1"))]


def test_nan_is_a_gap_and_a_cross(tmp_path):
    values = STEPS / 1000
    values[400:600] = np.nan
    figure = draw(plot(curve(values)))
    assert count(tmp_path, figure, "bad") > 100
    assert np.isnan(figure.axes[0].get_lines()[0].get_ydata()).sum() == 200
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["NaN or infinite (200)"]
    assert count(tmp_path, draw(plot(curve([np.nan], [1]))), "c0") == 0


def test_bytes_have_round_ticks():
    axes = draw(plot(curve(np.full(1000, 61e9)), unit="bytes", from_zero=True)).axes[0]
    assert [axes.yaxis.get_major_formatter()(tick) for tick in axes.get_yticks()][:3] == ["0", "20", "40"]
    assert axes.get_ylabel() == "GiB"


@pytest.mark.parametrize("label", [r"$\frac{$", "_hidden", "名前", "x" * 500, "<b>&\"'"])
def test_labels_are_not_interpreted(label):
    lines = [Line(label, curve(NOISY), 0), Line("other", curve(NOISY), 1)]
    figure = draw(plot(curve(NOISY), lines=lines, title=label))
    to_png(figure)
    assert len(figure.legends[0].get_texts()) == 2
    assert not Page(to_svg(figure, "p", label)).problems


def test_an_svg_follows_the_theme_and_names_its_parts(tmp_path):
    figure = draw(plot(curve(NOISY), restarts=[(300, None)]))
    svg = to_svg(figure, "loss", 'a "description" <of> it')
    page = Page(svg)
    assert page.problems == []
    assert svg.startswith('<svg role="img" aria-label="a &quot;description&quot; &lt;of&gt; it"')
    assert "loss-restart-0" in page.ids
    assert all(name.startswith("loss-") for name in page.ids)
    references = set(re.findall(r"#([\w-]+)[\")]", svg))
    assert references
    assert references <= set(page.ids)
    assert "var(--c0)" in svg
    assert not [colour for colour, _ in COLOURS.values() if colour in svg]
    assert svg == to_svg(draw(plot(curve(NOISY), restarts=[(300, None)])), "loss", 'a "description" <of> it')


def test_wall_times_are_bars_of_their_length():
    figure = draw_times([("a", {"steps": 0.75, "down": 0.25}), ("b", {"steps": 0.5, "lost": 0.5})])
    bars = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in figure.axes[0].patches]
    assert [(x, width) for x, width, _ in bars] == [(0, 0.75), (0.75, 0.25), (0, 0.5), (0.5, 0.5)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["steps", "lost", "down"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    alone = draw_times([("a", {"steps": 0.75, "down": 0.25})])
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["steps 75.0 %", "down 25.0 %"]


def test_pyplot_is_not_imported():
    import subprocess

    program = "import sys; from lmtrain.report import write; from lmtrain.report.draw import draw_times; "
    program += "from lmtrain.report.picture import to_png; "
    program += "before = 'matplotlib' in sys.modules; to_png(draw_times([('a', {'steps': 1.0})])); "
    program += "print(before, [name for name in ('matplotlib.pyplot', 'jax', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False []\n", done.stderr
