"""Draw the pictures of the pages, configs/guide/pictures/*.svg, with lmtrain's own code and fixed values.

    .venv/bin/python tools/pictures.py            writes them
    .venv/bin/python tools/pictures.py --check    exits with 1 if one of them is out of date

Coordinates may differ in their last digits, since processors round differently; everything else must be equal.

`tools/pictures_plan.json` holds figures that need the compiler of NVIDIA GPUs. They are from the output of
`lmtrain plan llama3_8b --device h100 --devices 8 --json`: copy the values of these keys after a change that moves them.
`tools/pictures_scaling.json` holds losses that were measured: `runs` of `lmtrain scaling status ladders/nano --json`,
`large` of `lmtrain train ladders/nano_large --trainer.seed N`, and `rates` of tools/bench/rates.py.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

from lmtrain.commands.scaling import read_ladder
from lmtrain.config.load import load_config
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.schedules import build_schedule
from lmtrain.plan import report
from lmtrain.plan.request import Plan
from lmtrain.report.charts import light
from lmtrain.report.curve import thin
from lmtrain.report.draw import draw, styled
from lmtrain.report.plots import Line, Plot, colour_of
from lmtrain.report.scaling_page import scaling_plots
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.scaling.fitted import fit_ladder
from lmtrain.scaling.points import best_rates, points, trials
from lmtrain.scaling.predict import predict, tokens_of
from lmtrain.scaling.results import Result, Results
from lmtrain.tracking.console import Console, Evaluated, Shown

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "configs" / "guide" / "pictures"
CURVE = ROOT / "tests" / "golden" / "gpt2_nano_curve.json"
PLAN = ROOT / "tools" / "pictures_plan.json"
SCALING = ROOT / "tools" / "pictures_scaling.json"

# colour and style of a line, by width and layers
_RATES = {
    "64x2, standard": (0, "o-"),
    "256x2, transfer": (1, "o-"),
    "256x2, standard": (1, "o--"),
    "64x8, transfer": (2, "o-"),
    "64x8, standard": (2, "o--"),
}

_STEPS = 40_000
_SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine (default)": {},
    "linear, decay: 0.2": {"lr_schedule": "linear", "decay": 0.2, "min_lr_ratio": 0.0},
    "inv_sqrt": {"lr_schedule": "inv_sqrt"},
    "cycles: 3, rewarmup: 0.05": {"cycles": 3, "rewarmup": 0.05},
}


def loss_curve() -> str:
    """The loss of gpt2_nano over the 200 steps of tests/golden/test_curve.py, as a report shows it."""
    losses = json.loads(CURVE.read_text())
    line = Line(label="train/loss", curve=thin(range(1, len(losses) + 1), losses), number=0)
    return _chart(
        Plot(
            name="loss",
            title="Training loss of gpt2_nano",
            unit="nats per token",
            lines=[line],
            last_step=len(losses),
            wide=True,
        )
    )


def schedules() -> str:
    """Learning-rate schedules over a run, as a report shows them."""
    lines = []
    steps = range(0, _STEPS, 80)
    for number, (label, settings) in enumerate(_SCHEDULES.items()):
        schedule = build_schedule(AdamConfig(learning_rate=1e-3, warmup=0.05, **settings), _STEPS)
        lines.append(Line(label=label, curve=thin(steps, [float(schedule(step)) for step in steps]), number=number))
    return _chart(
        Plot(name="schedules", title="Learning rate", unit="", lines=lines, last_step=_STEPS, wide=True, from_zero=True)
    )


def live_view() -> str:
    """The live view of a run, with the values of the README's quickstart."""
    shown = Shown(
        step=161,
        loss=5.1003,
        learning_rate=1.73e-3,
        tokens_per_second=7667.0,
        seconds_per_step=0.534,
        evaluated=Evaluated(150, 5.3602),
        next_evaluation=200,
        next_save=300,
    )
    terminal = mock.Mock(wraps=io.StringIO(), isatty=lambda: True, encoding="utf-8")
    with redirect_stderr(terminal), mock.patch.dict("os.environ", TERM="xterm"), Console(300, 0, True) as view:
        view.show(shown)
        drawn = view.drawn()
    console = _console(76)
    console.print(drawn)
    return _terminal(console, "lmtrain train configs/gpt2_nano.yaml")


def plan_memory() -> str:
    """The memory of a training step and the verdict of `lmtrain plan`."""
    figures = json.loads(PLAN.read_text())
    accelerator = find_accelerator(figures["device"])
    lines = [
        "training step as compiled, per device",
        *report.memory_lines(figures, accelerator),
        "",
        report.verdict(Plan({}, {"train": figures}), accelerator),
    ]
    console = _console(max(map(len, lines)) + 1)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return _terminal(console, f"lmtrain plan llama3_8b --device h100 --devices {figures['devices']}")


def scaling_law() -> str:
    """The runs of ladders/nano, the law of them, the prediction of ladders/nano_large, and its three runs."""
    losses = json.loads(SCALING.read_text())
    ladder = read_ladder(str(ROOT / "configs/ladders/nano.yaml"), None)
    tried = [Result(point=trial, step=trial.steps, loss=losses["runs"][trial.id]) for trial in trials(ladder)]
    rates = best_rates(ladder, losses["runs"])
    assert rates is not None
    law = [Result(point=point, step=point.steps, loss=losses["runs"][point.id]) for point in points(ladder, rates)]
    results = Results(tried, law)
    fitted = fit_ladder(ladder, results, None)
    config = load_config(RunConfig, str(ROOT / "configs/ladders/nano_large.yaml")).config
    prediction = predict(fitted, config.model, tokens_of(config))
    figure = scaling_plots(ladder, results, fitted, [prediction])["loss-by-tokens"]
    (axes,) = figure.axes
    measured = losses["large"]
    axes.plot([prediction.tokens] * len(measured), measured, "x", color=light("c1"), markersize=6)
    return _svg(figure, "scaling_law")


def scaling_rates() -> str:
    """Losses by learning rate of tools/bench/rates.py."""
    from matplotlib.figure import Figure

    losses = json.loads(SCALING.read_text())["rates"]
    with styled():
        figure = Figure(figsize=(6, 3.4))
        axes = figure.add_subplot()
        axes.set_title("Loss by learning rate")
        axes.set(xlabel="log2", ylabel="nats per token")
        for name, (colour, style) in _RATES.items():
            exponents = [int(rate.removeprefix("2^")) for rate in losses[name]]
            colours = light(colour_of(colour))
            axes.plot(exponents, losses[name].values(), style, color=colours, markersize=4, label=name)
        axes.set_xticks(exponents)
        figure.legend(loc="outside lower left", ncols=3)
    return _svg(figure, "scaling_rates")


DRAWN: dict[str, Callable[[], str]] = {
    "loss_curve.svg": loss_curve,
    "schedules.svg": schedules,
    "live_view.svg": live_view,
    "plan_memory.svg": plan_memory,
    "scaling_law.svg": scaling_law,
    "scaling_rates.svg": scaling_rates,
}


def _chart(plot: Plot) -> str:
    """A plot as a file."""
    with styled():
        return _svg(draw(plot), plot.name)


def _svg(figure: Any, name: str) -> str:
    """A figure as a file, with the same bytes each time."""
    import matplotlib

    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with styled(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


def _console(width: int) -> Any:
    from rich import console

    return console.Console(
        width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", _environ={}
    )


def _terminal(console: Any, title: str) -> str:
    """What a console printed, as a file that loads no fonts: a monospace font is on every machine."""
    svg = console.export_svg(title=title)
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COORDINATE_DECIMALS = 5
_TOLERANCE = 0.02  # of a coordinate


def is_same(stored: str, drawn: str) -> bool:
    """Whether two pictures are equal but for the last digits of coordinates."""
    if _NUMBER.split(stored) != _NUMBER.split(drawn):
        return False
    for ours, theirs in zip(_NUMBER.findall(stored), _NUMBER.findall(drawn), strict=True):
        decimals = max(len(text.partition(".")[2]) for text in (ours, theirs))
        if ours != theirs and (decimals < _COORDINATE_DECIMALS or abs(float(ours) - float(theirs)) > _TOLERANCE):
            return False
    return True


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    changed = []
    for name, draw_picture in DRAWN.items():
        path, drawn = PICTURES / name, draw_picture()
        if not path.exists() or not is_same(path.read_text(encoding="utf-8"), drawn):
            changed.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(drawn, encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        print(f"written: {', '.join(changed)}" if changed else "up to date")
        return 0
    print(f"out of date: {', '.join(changed)}; run tools/pictures.py" if changed else "up to date")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
