"""A report on disk: the page, and its plots beside it."""

import os
from collections.abc import Sequence

from lmtrain.config.errors import UserError
from lmtrain.report.draw import draw, draw_times, to_png, to_svg
from lmtrain.report.html import Markup
from lmtrain.report.page import build_page
from lmtrain.report.plots import plan_plots
from lmtrain.report.run import Run
from lmtrain.runtime.atomic_files import write_atomically


def write_report(runs: Sequence[Run], output: str) -> list[str]:
    """Write `output`, and `<output stem>-plots/*.png`. -> the PNG files. Raises `UserError` if that cannot be."""
    folder = f"{os.path.splitext(output)[0]}-plots"
    try:
        os.makedirs(folder, exist_ok=True)
        return _write(runs, output, folder)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror or error}") from None


def _write(runs: Sequence[Run], output: str, folder: str) -> list[str]:
    """The page last, so that it is there only with its plots. One figure at a time is in memory."""
    written = []
    pictures = []
    plots, notes = plan_plots(runs)
    for plot in plots:
        figure = draw(plot)
        written.append(_save(folder, plot.name, to_png(figure)))
        labels = ", ".join(line.label for line in plot.lines)
        pictures.append((Markup(to_svg(figure, plot.name, f"{plot.title} over steps: {labels}")), plot.wide))
    rows = [(run.name, run.fractions) for run in runs if sum(run.fractions.values()) > 0]
    times = Markup("")
    if rows:
        figure = draw_times(rows)
        written.append(_save(folder, "goodput", to_png(figure)))
        times = Markup(to_svg(figure, "goodput", "Parts of the wall time by kind"))
    page = build_page(runs, pictures, times, notes)
    write_atomically(output, page.encode("utf-8", errors="replace"))
    return written


def _save(folder: str, name: str, png: bytes) -> str:
    path = os.path.join(folder, f"{name}.png")
    write_atomically(path, png, durable=False)
    return path
