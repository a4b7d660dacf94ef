"""The page about a ladder: its law, its plots, which are also PNG files in a folder next to it, and its runs."""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain import __version__
from lmtrain.report.charts import css_variables, light
from lmtrain.report.draw import styled, to_png
from lmtrain.report.page import package_file, template, write_page
from lmtrain.report.plots import colour_of
from lmtrain.runtime.redact import redact
from lmtrain.scaling.describe import count, fit_lines, prediction_lines, status_lines
from lmtrain.scaling.fit import Law
from lmtrain.scaling.fitted import FittedLadder
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.predict import Prediction
from lmtrain.scaling.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SIZE = (5.5, 3.4)
_LEVELS = 12


def scaling_plots(
    ladder: Ladder, results: Results, fitted: FittedLadder | None, predictions: Sequence[Prediction] = ()
) -> dict[str, "Figure"]:
    """The plots by name; without a fit only that of the learning rates. `predictions` are marked among the runs."""
    figures: dict[str, Figure] = {}
    if fitted is not None:
        figures |= {
            "loss-by-tokens": _loss_by_tokens(fitted, predictions),
            "residuals": _residuals(fitted),
            "equal-loss": _equal_loss(fitted, predictions),
        }
    if results.trials:
        figures["learning-rates"] = _learning_rates(ladder, results)
    return figures


def _axes(title: str, x: str, y: str) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title)
    return figure, axes


def _logarithmic(axes: "Axes", names: str) -> None:
    """Logarithmic scales of these axes, `x` or `xy`, with labels such as `3 M`."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(lambda value, _: count(value))
        axis.set_minor_formatter(NullFormatter())


def _loss_by_tokens(fitted: FittedLadder, predictions: Sequence[Prediction]) -> "Figure":
    with styled():
        figure, axes = _axes("Loss by tokens", "tokens D", "nats per token")
        points = [run.point for run in fitted.runs]
        last = max([point.tokens for point in points] + [p.tokens for p in predictions])
        tokens = np.geomspace(min(point.tokens for point in points) / 1.5, last * 1.5, 200)
        for size in sorted({point.size for point in points}):
            runs = [run for run in fitted.runs if run.point.size == size]
            parameters = runs[0].point.parameters
            colour = light(colour_of(size))
            axes.plot(tokens, [fitted.fit.law.loss(parameters, d) for d in tokens], color=colour, linewidth=1.2)
            losses = [run.loss for run in runs if run.loss is not None]
            axes.plot(
                [run.point.tokens for run in runs],
                losses,
                "o",
                color=colour,
                markersize=4,
                label=f"N {count(parameters)}",
            )
        for prediction in predictions:
            low, high = prediction.interval
            axes.plot([prediction.tokens] * 2, [low, high], color=light("ink"), linewidth=1.4)
            label = f"predicted, N {count(prediction.parameters)}"
            axes.plot(prediction.tokens, prediction.loss, "D", color=light("ink"), markersize=5, label=label)
        _logarithmic(axes, "x")
        figure.legend(loc="outside lower left", ncols=3)
    return figure


def _residuals(fitted: FittedLadder) -> "Figure":
    with styled():
        figure, axes = _axes("Residuals", "tokens D", "law over loss, percent")
        for size in sorted({run.point.size for run in fitted.runs}):
            found = [
                (run.point.tokens, 100 * np.expm1(residual))
                for run, residual in zip(fitted.runs, fitted.fit.residuals, strict=True)
                if run.point.size == size
            ]
            label = f"N {count(fitted.ladder.sizes[size].parameters)}"
            axes.plot(*zip(*found, strict=True), "o", color=light(colour_of(size)), markersize=4, label=label)
        axes.axhline(0, color=light("soft"), linewidth=0.8)
        _logarithmic(axes, "x")
        figure.legend(loc="outside lower left", ncols=3)
    return figure


def _equal_loss(fitted: FittedLadder, predictions: Sequence[Prediction]) -> "Figure":
    law = fitted.fit.law
    n = [run.point.parameters for run in fitted.runs] + [p.parameters for p in predictions]
    d = [run.point.tokens for run in fitted.runs] + [p.tokens for p in predictions]
    x, y = np.geomspace(min(n) / 2, max(n) * 2, 120), np.geomspace(min(d) / 2, max(d) * 2, 120)
    losses = [[law.loss(parameters, tokens) for parameters in x] for tokens in y]
    with styled():
        figure, axes = _axes("Lines of equal loss", "parameters N", "tokens D")
        lines = axes.contour(x, y, losses, levels=_LEVELS, colors=light("soft"), linewidths=0.8)
        axes.clabel(lines, fontsize=7, fmt="%.3g")
        if not {"A", "alpha", "B", "beta"} & set(fitted.fit.unidentified):
            _best_sizes(axes, law, np.geomspace(x[0] * y[0], x[-1] * y[-1], 100))
        runs = len(fitted.runs)
        axes.plot(n[:runs], d[:runs], "o", color=light("c0"), markersize=4, label="runs of the ladder")
        if predictions:
            axes.plot(n[runs:], d[runs:], "D", color=light("ink"), markersize=5, label="predicted")
        _logarithmic(axes, "xy")
        axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        figure.legend(loc="outside lower left", ncols=2)
    return figure


def _best_sizes(axes: "Axes", law: Law, products: np.ndarray) -> None:
    """The best N at these N * D, between those with 0.1 % more loss."""
    best = np.array([law.best(product) for product in products])
    flat = np.array([law.flat_range(product) for product in products])
    axes.plot(best[:, 0], best[:, 1], color=light("c1"), linewidth=1.6, label="best N for its FLOPs")
    for column in (0, 1):
        label = "0.1 % more loss" if column == 0 else None
        style: dict[str, Any] = {"color": light("c1"), "linewidth": 0.8, "linestyle": (0, (3, 2))}
        axes.plot(flat[:, column], products / flat[:, column], label=label, **style)


def _learning_rates(ladder: Ladder, results: Results) -> "Figure":
    with styled():
        figure, axes = _axes("Loss by learning rate", "learning rate", "nats per token")
        for number, size in enumerate(ladder.sizes):
            found = [(run.point.rate, run.loss) for run in results.trials if run.point.size == number and run.loss]
            if found:
                label = f"width {size.model.hidden_dim}, {size.model.num_layers} layers"
                axes.plot(*zip(*found, strict=True), "o-", color=light(colour_of(number)), markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
        axes.set_xticks(ladder.rates)
        figure.legend(loc="outside lower left", ncols=2)
    return figure


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
