"""Plots as figures of matplotlib, in the light colours; `picture.py` turns them into files.

Figures are made without pyplot, so that matplotlib's global state does not change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.report.curve import Curve
from lmtrain.report.smooth import is_noisy, smooth, visible_range
from lmtrain.report.theme import CURVES, TIMES, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_FONT = 9.0
_FEW_POINTS = 80  # a curve of at most this number of points is drawn with dots
_DASHES = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
_GIB = 2**30
_CHARACTERS_PER_INCH = 13  # of a legend
_SMOOTH_WIDTH = 1.5


@dataclass(frozen=True)
class Line:
    """A curve, its name in the legend, the number of its colour, and the number of its run in the report."""

    label: str
    curve: Curve
    number: int
    run: int = 0


@dataclass(frozen=True)
class Plot:
    """A plot to draw. `name` is the file name without ending.

    `restarts` are steps, each with the number of its run, or None if the plot shows one run.
    """

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    last_step: int
    restarts: Sequence[tuple[int, int | None]] = field(default_factory=list)
    wide: bool = False
    from_zero: bool = False
    faint: bool = True  # draw the measured values, too, under a smoothed curve


def draw(plot: Plot) -> "Figure":
    """Draw curves over steps. The values of a noisy curve are drawn faintly under the smoothed curve."""
    entries: list[tuple[Any, str]] = []
    labels = [line.label for line in plot.lines] if len(plot.lines) > 1 else []
    columns = max(1, int(_width(plot.wide) * _CHARACTERS_PER_INCH // (8 + max(map(len, labels), default=0))))
    figure, axes = _figure(plot.wide, math.ceil(len(labels) / columns))
    for place, line in enumerate(plot.lines):
        handle = _draw_line(axes, line, place, plot.faint)
        if labels:
            entries.append((handle, line.label))
    top = _set_range(axes, plot)
    _draw_bad(axes, plot, entries)
    for number, restart in enumerate(plot.restarts):
        step, owner = restart
        colour = light("restart" if owner is None else colour_of(owner))
        mark = axes.axvline(step, color=colour, linewidth=0.9, linestyle=(0, (1.5, 2)), zorder=1)
        mark.set_gid(f"restart-{number}")
        if owner is None and number == 0:
            entries.append((mark, "restart"))
    _set_title(axes, plot, top)
    _set_ticks(axes, plot)
    _set_legend(figure, entries, columns)
    _lay_out(figure)
    return figure


def draw_times(rows: Sequence[tuple[str, dict[str, float]]]) -> "Figure":
    """Draw the wall time by kind, as one stacked bar per run."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in TIMES if any(fractions.get(kind, 0.0) > 0 for _, fractions in rows)]
    several = len(rows) > 1
    figure, axes = _figure(True, 1, height=0.95 + 0.36 * len(rows))
    for place, (_, fractions) in enumerate(rows):
        left = 0.0
        for kind in kinds:
            part = fractions.get(kind, 0.0)
            if part > 0:
                bar = axes.barh(place, part, left=left, height=0.62, color=light(TIMES[kind][0]), linewidth=0)
                bar[0].set_gid(f"time-{place}-{kind}")
            left += part
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1)
    names = [_plain(name, 30) for name, _ in rows] if several else []
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    _colour_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    _name(axes, "Where the wall time went")
    entries = []
    for kind in kinds:
        share = "" if several else f" {100 * rows[0][1].get(kind, 0.0):.1f} %"
        entries.append((Patch(color=light(TIMES[kind][0])), f"{kind.replace('_', ' ')}{share}"))
    _set_legend(figure, entries, 5)
    _lay_out(figure)
    return figure


def unit_of(plot: Plot) -> tuple[int, str]:
    """What values are divided by, and the name of that unit: bytes are shown in GiB."""
    return (_GIB, "GiB") if plot.unit == "bytes" else (1, plot.unit)


def colour_of(number: int) -> str:
    """The name of the colour of line or run `number` in the theme."""
    return CURVES[number % len(CURVES)]


def dashes_of(number: int) -> str:
    """The dashes of line `number` as an SVG's `stroke-dasharray`."""
    dashes: Any = _DASHES[number // len(CURVES) % len(_DASHES)]
    return "none" if dashes == "-" else " ".join(f"{_SMOOTH_WIDTH * part:g}" for part in dashes[1])


def _width(wide: bool) -> float:
    return 11.2 if wide else 5.5


def _figure(wide: bool, legend_rows: int, height: float = 0.0) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    height = height or (3.7 if wide else 2.75)
    figure = Figure(figsize=(_width(wide), height + 0.19 * legend_rows), dpi=_DPI, layout="constrained")
    figure.set_facecolor(light("paper"))
    return figure, figure.add_subplot()


def _lay_out(figure: "Figure") -> None:
    """Compute the layout once, rather than each time that the figure is written."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")


def _draw_line(axes: "Axes", line: Line, place: int, faint: bool) -> Any:
    curve, colour = line.curve, light(colour_of(line.number))
    dashes = _DASHES[line.number // len(CURVES) % len(_DASHES)]
    style: dict[str, Any]
    if is_noisy(curve):
        if faint:
            style = {"alpha": 0.25, "linewidth": 0.6, "zorder": 2, "gid": f"faint-{place}"}
            axes.plot(curve.steps, curve.values, color=colour, **style)
        steps, values = smooth(curve)
        style = {"linewidth": _SMOOTH_WIDTH, "linestyle": dashes, "zorder": 4, "gid": f"line-{place}"}
        return axes.plot(steps, values, color=colour, **style)[0]
    dot = "o" if np.isfinite(curve.values).sum() <= _FEW_POINTS else ""
    style = {
        "linewidth": 1.4,
        "linestyle": dashes,
        "marker": dot,
        "markersize": 3.0,
        "zorder": 3 - line.number / 1000,
        "gid": f"line-{place}",
    }
    return axes.plot(curve.steps, curve.values, color=colour, **style)[0]


def _draw_bad(axes: "Axes", plot: Plot, entries: list[tuple[Any, str]]) -> None:
    """Draw a cross at the top of the plot where a value was NaN or infinite."""
    steps = np.concatenate([line.curve.bad_steps for line in plot.lines])
    if not len(steps):
        return
    number = sum(line.curve.bad for line in plot.lines)
    place = axes.get_xaxis_transform()
    style: dict[str, Any] = {"marker": "x", "markersize": 5.0, "linestyle": "", "color": light("bad"), "zorder": 5}
    mark = axes.plot(steps, np.full(len(steps), 0.97), transform=place, **style)[0]
    mark.set_gid("bad")
    entries.append((mark, f"NaN or infinite ({number:,})"))


def _set_range(axes: "Axes", plot: Plot) -> float:
    """Set the ranges of both axes. Returns the largest y value that is visible."""
    low, high = visible_range([line.curve for line in plot.lines])
    if plot.from_zero and low >= 0:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low if low == 0 and plot.from_zero else low - margin, high + margin)
    span = max(plot.last_step, 1)
    axes.set_xlim(-0.01 * span, 1.01 * span)
    return high + margin


def _set_title(axes: "Axes", plot: Plot, top: float) -> None:
    """Set the title, the axis labels, and a note with the highest value if it is above the plot."""
    _name(axes, plot.title)
    axes.set_xlabel("step", color=light("soft"), fontsize=_FONT - 1)
    axes.set_ylabel(unit_of(plot)[1], color=light("soft"), fontsize=_FONT - 1)
    highest = [line.curve.highest for line in plot.lines if line.curve.highest is not None]
    step, value = max(highest, key=lambda found: found[1], default=(0, -math.inf))
    if value > top:
        note = f"▲ {_with_unit(value, plot)} at step {step:,}"
        axes.set_title(note, loc="right", fontsize=_FONT - 1, color=light("soft")).set_gid("note")


def _name(axes: "Axes", title: str) -> None:
    text = axes.set_title(_plain(title, 70), loc="left", fontsize=_FONT + 2, color=light("ink"), fontweight="bold")
    text.set_parse_math(False)


def _set_ticks(axes: "Axes", plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    _colour_axes(axes)
    axes.grid(axis="y", color=light("line"), linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(10 if plot.wide else 5, steps=_STEPS, integer=True))
    axes.xaxis.set_gid("axis-x")
    axes.yaxis.set_gid("axis-y")
    unit, _ = unit_of(plot)
    low, high = axes.get_ylim()
    ticks = np.asarray(MaxNLocator(6, steps=_STEPS).tick_values(low / unit, high / unit)) * unit
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: _number(value / unit))


def _colour_axes(axes: "Axes") -> None:
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.tick_params(color=light("line"), labelcolor=light("soft"), labelsize=_FONT - 1)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(light("line"))


def _set_legend(figure: "Figure", entries: list[tuple[Any, str]], columns: int) -> None:
    if not entries:
        return
    # matplotlib leaves out labels with a leading `_`, and reads `$` as mathematics
    labels = [_plain(label, 60) for _, label in entries]
    legend = figure.legend(
        [handle for handle, _ in entries],
        [f"\u200b{label}" if label.startswith("_") else label for label in labels],
        loc="outside lower left",
        ncols=max(1, min(columns, len(entries))),
        frameon=False,
        fontsize=_FONT - 1,
        labelcolor=light("ink"),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _with_unit(value: float, plot: Plot) -> str:
    size, unit = unit_of(plot)
    return f"{_number(value / size)} {unit}" if size > 1 else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(text: str, most: int) -> str:
    """At most `most` characters, without those that the picture's font may lack; the page shows the full text."""
    plain = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in text)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"
