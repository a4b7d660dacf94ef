"""The page: one HTML file that needs nothing else, and its plots as PNG files in a folder next to it.

`page.html` is its markup, which receives texts, tables and plots. Its policy forbids loading anything, and any script
but its own. The script draws the curves; without it the page shows the PNG files, which it contains.
"""

import base64
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lmtrain import __version__
from lmtrain.report.charts import TIMES, css_variables
from lmtrain.report.curve import RULE
from lmtrain.report.draw import draw, to_png
from lmtrain.report.plots import Plot, choose_plots, colour_of, plot_data, run_data
from lmtrain.report.run import LoggedRun
from lmtrain.report.tables import (
    Cell,
    attempts_table,
    differences_table,
    evaluations_table,
    facts_table,
    format_time,
    samples_tables,
    summaries_table,
    summarize,
    times_table,
)
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import write_atomically

if TYPE_CHECKING:
    from jinja2 import Template

SCRIPTS = ("scale.js", "draw.js", "chart.js", "controls.js")  # in the order in which they use one another


def write_report(runs: Sequence[LoggedRun], output: str) -> list[str]:
    """Write `output` and `<output stem>-plots/*.png`. Returns the PNG files. Raises `UserError` if writing fails."""
    plots, notes = choose_plots(runs)
    pictures = {plot.name: to_png(draw(plot)) for plot in plots}
    return write_page(output, build_page(runs, plots, pictures, notes), pictures)


def write_page(output: str, page: str, pictures: Mapping[str, bytes]) -> list[str]:
    """Write the pictures, then the page, which exists only with them. Raises `UserError` if writing fails."""
    folder = f"{os.path.splitext(output)[0]}-plots"
    paths = {os.path.join(folder, f"{name}.png"): picture for name, picture in pictures.items()}
    with remote_errors(f"--output {output}", "written"):
        os.makedirs(folder, exist_ok=True)
        for path, picture in paths.items():
            write_atomically(path, picture, durable=False)
        write_atomically(output, page.encode("utf-8", errors="replace"))
    return list(paths)


def build_page(
    runs: Sequence[LoggedRun], plots: Sequence[Plot], pictures: dict[str, bytes], notes: Sequence[str]
) -> str:
    """The page as text. `pictures` are the plots as PNG by name; `notes` are shown below the plots."""
    several = len(runs) > 1
    names = [Cell(run.name, colour=colour_of(number) if several else "") for number, run in enumerate(runs)]
    return template("page.html").render(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {script_source()}",
        version=__version__,
        light=css_variables(0),
        dark=css_variables(1),
        style=package_file("page.css"),
        script=script(),
        data={"runs": [run_data(run) for run in runs], "plots": {plot.name: plot_data(plot) for plot in plots}},
        title=" and ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs",
        several=several,
        paths=[run.files.metrics for run in runs],
        notices=[f"{run.name}: {text}" if several else text for run in runs for text in run.notices],
        summary=summaries_table(runs, names),
        figures={name: cell for name, cell in summarize(runs[0]).items() if cell.value},
        differences=differences_table(runs, names),
        plots=plots,
        pictures={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        restarts=any(run.restarts for run in runs),
        notes=notes,
        bars=[_bar(run) for run in runs if sum(run.fractions.values()) > 0],
        times=times_table(runs, names),
        evaluations=evaluations_table(runs, names),
        abouts=[_about(run, name) for run, name in zip(runs, names, strict=True)],
        made=format_time(time.time()),
        rule=RULE,
    )


def template(name: str) -> "Template":
    """A page of this package as a template that escapes text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}
    return environment.from_string(package_file(name))


def script() -> str:
    """The page's JavaScript."""
    return '"use strict";\n' + "\n".join(map(package_file, SCRIPTS))


def script_source() -> str:
    """What a Content-Security-Policy allows: a script with these bytes. Text of a run can never run as one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}'"


@cache
def package_file(name: str) -> str:
    """The text of a file of this package."""
    return files("lmtrain.report").joinpath(name).read_text(encoding="utf-8")


def _bar(run: LoggedRun) -> dict[str, Any]:
    """The wall time of a run by kind, as the parts of a bar."""
    parts = [
        {"title": f"{run.name}: {kind.replace('_', ' ')} {100 * part:.1f} %", "percent": 100 * part, "colour": colour}
        for kind, (colour, _) in TIMES.items()
        if (part := run.fractions.get(kind, 0.0)) > 0
    ]
    return {"name": run.name, "parts": parts}


def _about(run: LoggedRun, name: Cell) -> dict[str, Any]:
    """Samples, starts, versions and config of one run."""
    return {
        "name": name,
        "samples": samples_tables(run.samples),
        "starts": attempts_table(run.attempts) if run.attempts else None,
        "facts": facts_table(run),
        "config": run.config_text,
    }
