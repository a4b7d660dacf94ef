"""Plots as pictures: a PNG for papers and chats, and an SVG for the page, in which colours follow its theme.

Figures are made without pyplot, so that nothing of matplotlib's global state is touched.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.report.curve import Curve
from lmtrain.report.smooth import is_noisy, smooth, visible_range
from lmtrain.report.theme import COLOURS, CURVES, TIMES, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_FONT = 9.0
_FEW_POINTS = 80  # up to so many are drawn with dots
_DASHES = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
_GIB = 2**30
_CHARACTERS_AN_INCH = 13  # of a legend


@dataclass(frozen=True)
class Line:
    """A curve with what it is called and its place among the colours."""

    label: str
    curve: Curve
    number: int


@dataclass(frozen=True)
class Plot:
    """`name` is that of the file. `restarts` are steps, each with the number of the line it belongs to, or None."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    last_step: int
    restarts: Sequence[tuple[int, int | None]] = field(default_factory=list)
    wide: bool = False
    from_zero: bool = False
    faint: bool = True  # draw what a smoothed curve is made of, too


def draw(plot: Plot) -> "Figure":
    """Curves over steps; those that are noisy are drawn faintly under a smoothed one."""
    entries: list[tuple[Any, str]] = []
    labels = [line.label for line in plot.lines] if len(plot.lines) > 1 else []
    columns = max(1, int(_width(plot.wide) * _CHARACTERS_AN_INCH // (8 + max(map(len, labels), default=0))))
    figure, axes = _figure(plot.wide, math.ceil(len(labels) / columns))
    for line in plot.lines:
        handle = _draw_line(axes, line, plot.faint)
        if labels:
            entries.append((handle, line.label))
    top = _set_range(axes, plot)
    _draw_bad(axes, plot, entries)
    for number, restart in enumerate(plot.restarts):
        step, owner = restart
        colour = light("restart") if owner is None else _colour(owner)
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
    """Parts of the wall time as one bar for each run."""
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


def to_png(figure: "Figure") -> bytes:
    """A figure as a PNG, the same bytes each time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """An `svg` element for a page: its colours are variables of the page's style, its ids begin with `name`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    ids = {found: f"{name}-{number}" for number, found in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    ids |= {found: f"{name}-{found}" for found in ids if found.startswith(("restart-", "time-"))}
    text = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{ids[found[1]]}"', text)
    text = re.sub(r"#([\w-]+)(?=[\")])", lambda found: f"#{ids.get(found[1], found[1])}", text)
    for variable, (colour, _) in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)
    label = f' role="img" aria-label="{html.escape(description)}" stroke-linejoin="round"'
    return text.replace("<svg", f"<svg{label}", 1).strip()


def _width(wide: bool) -> float:
    return 11.2 if wide else 5.5


def _figure(wide: bool, legend_rows: int, height: float = 0.0) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    height = height or (3.7 if wide else 2.75)
    figure = Figure(figsize=(_width(wide), height + 0.19 * legend_rows), dpi=_DPI, layout="constrained")
    figure.set_facecolor(light("paper"))
    return figure, figure.add_subplot()


def _lay_out(figure: "Figure") -> None:
    """Once, rather than each time that the figure is written."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")


def _draw_line(axes: "Axes", line: Line, faint: bool) -> Any:
    curve, colour = line.curve, _colour(line.number)
    dashes = _DASHES[line.number // len(CURVES) % len(_DASHES)]
    if is_noisy(curve):
        if faint:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.25, linewidth=0.6, zorder=2)
        steps, values = smooth(curve)
        return axes.plot(steps, values, color=colour, linewidth=1.5, linestyle=dashes, zorder=4)[0]
    dot = "o" if np.isfinite(curve.values).sum() <= _FEW_POINTS else ""
    style: dict[str, Any] = {
        "linewidth": 1.4,
        "linestyle": dashes,
        "marker": dot,
        "markersize": 3.0,
        "zorder": 3 - line.number / 1000,
    }
    return axes.plot(curve.steps, curve.values, color=colour, **style)[0]


def _draw_bad(axes: "Axes", plot: Plot, entries: list[tuple[Any, str]]) -> None:
    """A cross at the top where a value was no finite number."""
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
    """-> the top"""
    low, high = visible_range([line.curve for line in plot.lines])
    if plot.from_zero and low >= 0:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low if low == 0 and plot.from_zero else low - margin, high + margin)
    span = max(plot.last_step, 1)
    axes.set_xlim(-0.01 * span, 1.01 * span)
    return high + margin


def _set_title(axes: "Axes", plot: Plot, top: float) -> None:
    """The title, the axes, and the highest value if it lies above the plot."""
    _name(axes, plot.title)
    axes.set_xlabel("step", color=light("soft"), fontsize=_FONT - 1)
    axes.set_ylabel("GiB" if _is_memory(plot) else plot.unit, color=light("soft"), fontsize=_FONT - 1)
    highest = [line.curve.highest for line in plot.lines if line.curve.highest is not None]
    step, value = max(highest, key=lambda found: found[1], default=(0, -math.inf))
    if value > top:
        note = f"▲ {_with_unit(value, plot)} at step {step:,}"
        axes.set_title(note, loc="right", fontsize=_FONT - 1, color=light("soft"))


def _name(axes: "Axes", title: str) -> None:
    text = axes.set_title(_plain(title, 70), loc="left", fontsize=_FONT + 2, color=light("ink"), fontweight="bold")
    text.set_parse_math(False)


def _set_ticks(axes: "Axes", plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    _colour_axes(axes)
    axes.grid(axis="y", color=light("line"), linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(10 if plot.wide else 5, steps=_STEPS, integer=True))
    unit = _GIB if _is_memory(plot) else 1
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
    # a leading `_` means "not in the legend" to matplotlib, and `$` mathematics
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
    return f"{_number(value / _GIB)} GiB" if _is_memory(plot) else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_memory(plot: Plot) -> bool:
    return plot.unit == "bytes"


def _colour(number: int) -> str:
    return light(CURVES[number % len(CURVES)])


def _plain(text: str, most: int) -> str:
    """Without what the font of a picture may not have; the page has the whole."""
    plain = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in text)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"
