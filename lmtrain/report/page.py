"""The page: one HTML file that needs nothing else. Its policy forbids loading anything, and any script but its own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain import __version__
from lmtrain.report.chart_data import run_data
from lmtrain.report.curve import RULE
from lmtrain.report.html import Markup, element, swatch
from lmtrain.report.run import Run
from lmtrain.report.samples import samples_tables
from lmtrain.report.script import script_elements, script_source
from lmtrain.report.summary import summarize
from lmtrain.report.tables import (
    attempts_table,
    differences_table,
    evaluations_table,
    facts_table,
    format_time,
    summaries_table,
    times_table,
)
from lmtrain.report.theme import CURVES, STYLE

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "


@dataclass(frozen=True)
class Picture:
    """A plot on the page: its SVG, whether it is as wide as the page, and its data for the script."""

    svg: Markup
    wide: bool
    data: dict[str, Any]


def build_page(runs: Sequence[Run], pictures: Sequence[Picture], times: Markup, notes: list[str]) -> str:
    """`times` is the bar of wall time, empty if it is unknown; `notes` are shown below the plots."""
    several = len(runs) > 1
    names = [_name(run, number if several else None) for number, run in enumerate(runs)]
    title = " and ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY + script_source()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"lmtrain {__version__}"),
        element("title", f"{title} - lmtrain report"),
        element("style", Markup(STYLE)),
    )
    parts = [_header(runs, title), _notices(runs, several)]
    parts.append(_section("Summary", summaries_table(runs, names)) if several else _tiles(runs[0]))
    parts.append(_differences(runs, names) if several else Markup(""))
    parts += [_curves(pictures, notes, runs), _times(runs, names, times), _evaluations(runs, names)]
    for run, name in zip(runs, names, strict=True):
        parts.append(_about(run, name if several else None))
    made = f"Made {format_time(time.time())} by lmtrain {__version__}. {RULE}"
    data = {"runs": [run_data(run) for run in runs], "plots": {each.data["name"]: each.data for each in pictures}}
    body = element("body", element("main", *parts, element("p", element("small", made))), script_elements(data))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _name(run: Run, number: int | None) -> Markup:
    """The name of a run, with the colour that it has in all plots."""
    mark = "" if number is None else swatch(CURVES[number % len(CURVES)])
    return Markup(mark + element("span", run.name))


def _header(runs: Sequence[Run], title: str) -> Markup:
    what = "Training run" if len(runs) == 1 else "Training runs side by side"
    paths = [element("p", run.files.metrics, class_="soft path") for run in runs]
    return element("header", element("p", what, class_="soft"), element("h1", title), *paths)


def _notices(runs: Sequence[Run], several: bool) -> Markup:
    lines = [f"{run.name}: {text}" if several else text for run in runs for text in run.notices]
    return element("ul", *(element("li", line) for line in lines), class_="notices") if lines else Markup("")


def _tiles(run: Run) -> Markup:
    tiles = [
        element(
            "div", element("span", entry.label), element("b", entry.value), element("span", entry.note), class_="tile"
        )
        for entry in summarize(run)
        if entry.value
    ]
    return element("section", *tiles, class_="tiles")


def _differences(runs: Sequence[Run], names: Sequence[Markup]) -> Markup:
    known = sum(run.config is not None for run in runs)
    if known < 2:
        return Markup("")
    found = differences_table(runs, names)
    return _section("Settings that differ", found or element("p", "All settings are the same.", class_="soft"))


def _curves(pictures: Sequence[Picture], notes: list[str], runs: Sequence[Run]) -> Markup:
    text = "The measured values of a noisy curve are drawn faintly under a smoothed curve. "
    text += "A ▲ marks the highest value if it is above the plot. "
    if any(run.restarts for run in runs):
        text += f"Dotted vertical lines are restarts{', in the colour of their run' if len(runs) > 1 else ''}. "
    figures = [
        element("figure", each.svg, class_="wide" if each.wide else "", data_chart=each.data["name"])
        for each in pictures
    ]
    remarks = [element("p", element("small", line)) for line in [text, *notes]]
    return element("section", element("h2", "Curves"), element("div", *figures, class_="plots"), *remarks)


def _times(runs: Sequence[Run], names: Sequence[Markup], bar: Markup) -> Markup:
    if not bar:
        return Markup("")
    text = "Goodput is the fraction of the wall time since the first start of a run that was spent on steps that count."
    return _section("Goodput", element("figure", bar), element("p", element("small", text)), times_table(runs, names))


def _evaluations(runs: Sequence[Run], names: Sequence[Markup]) -> Markup:
    found = evaluations_table(runs, names)
    return _section("Evaluation", found) if found else Markup("")


def _about(run: Run, name: Markup | None) -> Markup:
    """Samples, starts, versions and config of one run; with several runs, folded under the run's name."""
    facts = facts_table(run)
    parts = []
    if run.samples:
        parts.append(_section("Samples", samples_tables(run.samples)))
    if run.attempts:
        parts.append(_section("Starts", attempts_table(run.attempts)))
    if facts is not None:
        parts.append(_section("Versions and devices", facts))
    if run.config_text is not None:
        title = element("summary", "Resolved config" if name is None else "Show")
        shown = element("details", title, element("pre", run.config_text))
        parts.append(_section("Config", shown))
    if name is None or not parts:
        return Markup("".join(parts))
    return element("details", element("summary", name), *parts)


def _section(title: str, *content: str) -> Markup:
    return element("section", element("h2", title), *content)
