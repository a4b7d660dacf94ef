"""A report on disk: the page, and its plots as PNG files in a folder next to it."""

import os
from collections.abc import Sequence

from lmtrain.config.errors import UserError
from lmtrain.report.chart_data import plot_data
from lmtrain.report.draw import draw, draw_times
from lmtrain.report.html import Markup
from lmtrain.report.page import Picture, build_page
from lmtrain.report.picture import to_png, to_svg, with_titles
from lmtrain.report.plots import plan_plots
from lmtrain.report.run import Run
from lmtrain.runtime.atomic_files import write_atomically


def write_report(runs: Sequence[Run], output: str) -> list[str]:
    """Write `output` and `<output stem>-plots/*.png`. Returns the PNG files. Raises `UserError` if writing fails."""
    folder = f"{os.path.splitext(output)[0]}-plots"
    try:
        os.makedirs(folder, exist_ok=True)
        return _write(runs, output, folder)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror or error}") from None


def _write(runs: Sequence[Run], output: str, folder: str) -> list[str]:
    """Write the page last, so that it exists only with its plots. One figure at a time is in memory."""
    written = []
    pictures = []
    plots, notes = plan_plots(runs)
    for plot in plots:
        figure = draw(plot)
        written.append(_save(folder, plot.name, to_png(figure)))
        labels = ", ".join(line.label for line in plot.lines)
        svg = to_svg(figure, plot.name, f"{plot.title} over steps: {labels}")
        pictures.append(Picture(Markup(svg), plot.wide, plot_data(plot, figure)))
    rows = [(run.name, run.fractions) for run in runs if sum(run.fractions.values()) > 0]
    times = Markup("")
    if rows:
        figure = draw_times(rows)
        written.append(_save(folder, "goodput", to_png(figure)))
        titles = {
            f"goodput-time-{place}-{kind}": f"{name}: {kind.replace('_', ' ')} {100 * fraction:.1f} %"
            for place, (name, fractions) in enumerate(rows)
            for kind, fraction in fractions.items()
        }
        times = Markup(with_titles(to_svg(figure, "goodput", "Wall time by kind"), titles))
    page = build_page(runs, pictures, times, notes)
    write_atomically(output, page.encode("utf-8", errors="replace"))
    return written


def _save(folder: str, name: str, png: bytes) -> str:
    path = os.path.join(folder, f"{name}.png")
    write_atomically(path, png, durable=False)
    return path
