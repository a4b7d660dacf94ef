"""The page about a ladder: its law, its plots, which are also PNG files in a folder next to it, and its runs."""

import base64
from collections.abc import Mapping, Sequence

from lmtrain import __version__
from lmtrain.config.redact import redact
from lmtrain.report.draw import to_png
from lmtrain.report.page import package_file, template, write_page
from lmtrain.report.scaling_plots import scaling_plots
from lmtrain.report.theme import css_variables
from lmtrain.scaling.describe import fit_lines, prediction_lines, status_lines
from lmtrain.scaling.fitted import FittedLadder
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.predict import Prediction
from lmtrain.scaling.results import Results


def write_scaling_report(
    ladder: Ladder,
    results: Results,
    fitted: FittedLadder | None,
    reason: str,
    predictions: Mapping[str, Prediction],
    effects: Mapping[str, Sequence[str]],
    settings: str,
    output: str,
) -> Sequence[str]:
    """Write `output` and `<output stem>-plots/*.png`. Returns the PNG files. Raises `UserError` if writing fails.

    `reason` says why there is no fit, `predictions` are those of configs by name, `effects` lines on what the law does
    not know about them, `settings` the text of the ladder.
    """
    figures = scaling_plots(ladder, results, fitted, list(predictions.values()))
    pictures = {name: to_png(figure) for name, figure in figures.items()}
    law = [reason] if fitted is None else list(fit_lines(fitted))
    for name, prediction in predictions.items():
        law += ["", redact(name), *effects[name], *prediction_lines(prediction)]
    page = template("scaling.html").render(
        version=__version__,
        light=css_variables(0),
        style=package_file("page.css"),
        title=ladder.name,
        path=redact(ladder.path),
        law="\n".join(law),
        runs="\n".join(status_lines(ladder, results)),
        settings=settings,
        pictures={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
    )
    return write_page(output, page, pictures)
