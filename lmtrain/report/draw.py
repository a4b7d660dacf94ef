"""Plots as PNG files, drawn by matplotlib in the light colours.

Figures are made without pyplot, so that matplotlib's global state does not change.
"""

import io
import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.report.charts import light
from lmtrain.report.curve import is_noisy, smooth
from lmtrain.report.plots import Line, Plot, colour_of, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONT = 9.0
_MAX_DOTS = 80  # a curve of at most this number of points is drawn with dots
_TICKS = [1, 2, 2.5, 5, 10]  # distances, times a power of ten
_CHARACTERS_PER_INCH = 13  # of a legend

_STYLE: Any = {
    "text.parse_math": False,  # `$` in a name is a dollar
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "figure.facecolor": light("paper"),
    "axes.facecolor": "none",
    "axes.edgecolor": light("line"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": light("line"),
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": _FONT + 2,
    "axes.titlecolor": light("ink"),
    "axes.labelsize": _FONT - 1,
    "axes.labelcolor": light("soft"),
    "legend.fontsize": _FONT - 1,
    "legend.labelcolor": light("ink"),
    "legend.frameon": False,
} | {
    f"{axis}tick.{name}": value
    for axis in "xy"
    for name, value in {"color": light("line"), "labelcolor": light("soft"), "labelsize": _FONT - 1}.items()
}


def styled() -> AbstractContextManager[None]:
    """Matplotlib's settings for these plots, in which figures are made and written."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def to_png(figure: "Figure") -> bytes:
    """A figure as a PNG: the same bytes each time."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def draw(plot: Plot) -> "Figure":
    """Draw curves over steps. The values of a noisy curve are drawn faintly under the smoothed curve."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with styled():
        width, height = (11.2, 3.7) if plot.wide else (5.5, 2.75)
        longest = max((len(line.label) for line in plot.lines), default=0)
        columns = max(1, int(width * _CHARACTERS_PER_INCH // (8 + longest)))
        rows = math.ceil(len(plot.lines) / columns) if len(plot.lines) > 1 else 0
        figure = Figure(figsize=(width, height + 0.19 * rows))
        axes = figure.add_subplot()
        entries = [(_draw_line(axes, line, plot.faint), line.label) for line in plot.lines]
        if len(entries) == 1:
            entries = []
        if plot.bad:
            steps = np.concatenate([line.curve.bad_steps for line in plot.lines])
            style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": light("bad"), "zorder": 5}
            mark = axes.plot(steps, np.full(len(steps), 0.97), "x", markersize=5.0, **style)[0]
            entries.append((mark, f"NaN or infinite ({plot.bad:,})"))
        for number, (step, owner) in enumerate(plot.restarts):
            colour = light("restart" if owner is None else colour_of(owner))
            mark = axes.axvline(step, color=colour, linewidth=0.9, linestyle=(0, (1.5, 2)), zorder=1)
            if owner is None and number == 0:
                entries.append((mark, "restart"))
        span, (size, unit) = max(plot.last_step, 1), plot.scale
        axes.set(xlabel="step", ylabel=unit, xlim=(-0.01 * span, 1.01 * span), ylim=plot.y_range)
        axes.set_title(_plain(plot.title, 70))
        axes.set_title(plot.note, loc="right", fontsize=_FONT - 1, color=light("soft"), fontweight="normal")
        axes.xaxis.set_major_locator(MaxNLocator(10 if plot.wide else 5, steps=_TICKS, integer=True))
        low, high = plot.y_range
        ticks = np.asarray(MaxNLocator(6, steps=_TICKS).tick_values(low / size, high / size)) * size
        axes.set_yticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: format_number(value / size))
        if entries:
            handles, labels = zip(*entries, strict=True)
            columns = min(columns, len(entries))
            figure.legend(handles, [_plain(label, 60) for label in labels], loc="outside lower left", ncols=columns)
    return figure


def _draw_line(axes: "Axes", line: Line, faint: bool) -> Any:
    curve, colour = line.curve, light(line.colour)
    style: dict[str, Any] = {"color": colour, "linestyle": (0, line.dashes) if line.dashes else "-"}
    if not is_noisy(curve):
        dot = "o" if np.isfinite(curve.values).sum() <= _MAX_DOTS else ""
        above = 3 - line.number / 1000
        return axes.plot(curve.steps, curve.values, linewidth=1.4, marker=dot, markersize=3.0, zorder=above, **style)[0]
    if faint:
        axes.plot(curve.steps, curve.values, color=colour, alpha=0.25, linewidth=0.6, zorder=2)
    return axes.plot(*smooth(curve), linewidth=1.5, zorder=4, **style)[0]


def _plain(text: str, most: int) -> str:
    """At most `most` characters, without those that the picture's font may lack; the page shows the full text."""
    plain = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in text)
    plain = plain if len(plain) <= most else f"{plain[: most - 1]}…"
    return f"\u200b{plain}" if plain.startswith("_") else plain  # matplotlib leaves out labels with a leading `_`
