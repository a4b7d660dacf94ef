"""What is plotted (one row per plot, with its metrics; other metrics are left out), and in which colors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

MAX_METRICS = 16  # that one plot can show


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot. `metrics` is a regular expression for complete names.

    When runs are compared, each of the first `compared` metrics has a separate plot.
    """

    name: str
    title: str
    unit: str
    metrics: str
    from_zero: bool = False
    compared: int = MAX_METRICS


CHARTS = (
    Chart(name="loss", title="Training loss", unit="nats per token", metrics="train/loss"),
    Chart(name="eval-loss", title="Evaluation loss", unit="nats per token", metrics=r"eval/(.+/)?(macro_)?loss"),
    Chart(name="eval-bpb", title="Evaluation, bits per byte", unit="bits per byte", metrics=r"eval/(.+/)?(macro_)?bpb"),
    Chart(
        name="eval-other",
        title="Other evaluations",
        unit="",
        metrics=r"eval/(?!(.+/)?(macro_)?(loss|bpb)$|(ema/)?tokens$).+",
    ),
    Chart(name="learning-rate", title="Learning rate", unit="", metrics="train/learning_rate", from_zero=True),
    Chart(name="gradient-norm", title="Gradient norm", unit="", metrics="train/gradient_norm", from_zero=True),
    Chart(name="parameter-norm", title="Parameter norm", unit="", metrics="params/norm/total"),
    Chart(
        name="expert-load",
        title="Load of experts",
        unit="relative to the mean",
        metrics=r"moe/(max|min|max_device)_load",
        from_zero=True,
    ),
    Chart(
        name="layer-load",
        title="Most used expert of a layer",
        unit="relative to the mean",
        metrics="moe/max_load/.+",
        compared=1,
    ),
    Chart(
        name="dead-experts",
        title="Experts without a token",
        unit="in all layers",
        metrics="moe/dead_experts",
        from_zero=True,
    ),
    Chart(
        name="router-losses",
        title="Losses of the routers",
        unit="without coefficients",
        metrics=r"moe/(balance|z)_loss",
        compared=1,
    ),
    Chart(name="router-entropy", title="Entropy of the routers", unit="nats", metrics="moe/router_entropy"),
    Chart(name="skipped-steps", title="Updates skipped so far", unit="", metrics="optim/skipped_steps", from_zero=True),
    Chart(
        name="throughput",
        title="Throughput",
        unit="tokens per second",
        metrics="throughput/tokens_per_second",
        from_zero=True,
    ),
    Chart(
        name="mfu",
        title="Model FLOPs utilization",
        unit="percent",
        metrics=r"throughput/mfu(_causal)?",
        from_zero=True,
        compared=1,
    ),
    Chart(
        name="step-time",
        title="Time of a step",
        unit="seconds",
        metrics=r"throughput/(duration|\w+_time)",
        from_zero=True,
        compared=1,
    ),
    Chart(
        name="saving",
        title="Training waits for a save",
        unit="seconds",
        metrics="checkpoint/blocking_seconds",
        from_zero=True,
    ),
    Chart(
        name="memory",
        title="Peak memory",
        unit="bytes",
        metrics=r"memory/(.+/)?(.+_)?peak_bytes",
        from_zero=True,
        compared=2,
    ),
)

TOKENS, DURATION = "throughput/total_tokens", "throughput/duration"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
_PLOTTED = re.compile("|".join(f"(?:{chart.metrics})" for chart in CHARTS))


@cache  # called for every value of a log
def is_wanted(metric: str) -> bool:
    """Whether a report shows this metric."""
    return metric == TOKENS or _PLOTTED.fullmatch(metric) is not None


def metrics_of(chart: Chart, metrics: Iterable[str]) -> list[str]:
    """The metrics that belong in a chart: those of all data sets together first, then by name."""
    names = sorted(set(metrics), key=lambda name: (name.count("/"), name.endswith(("macro_loss", "macro_bpb")), name))
    return [name for name in names if re.fullmatch(chart.metrics, name)]


# name -> (light, dark)
COLOURS = {
    "ink": ("#1c2530", "#e4e8ee"),
    "soft": ("#5d6b7a", "#9aa7b6"),
    "line": ("#dde2e8", "#333d49"),
    "paper": ("#ffffff", "#14181d"),
    "panel": ("#f6f8fa", "#1b2128"),
    "bad": ("#c81e1e", "#ff7b72"),
    "restart": ("#8a5a00", "#e0b050"),
    "c0": ("#1f63c9", "#6ea8fe"),
    "c1": ("#d9610b", "#ff9d57"),
    "c2": ("#0f8a5f", "#4fd6a2"),
    "c3": ("#8b3fc6", "#c792ff"),
    "c4": ("#b8256a", "#ff7eb6"),
    "c5": ("#0e87a0", "#52d3ec"),
    "c6": ("#7a6a00", "#d8c53a"),
    "c7": ("#6b7280", "#aab3bf"),
}
CURVES = [name for name in COLOURS if name[0] == "c" and name[1:].isdigit()]

# The kinds of wall time in the order of the bar, each with its colour and its meaning.
TIMES = {
    "steps": ("c0", "training that counts"),
    "evaluation": ("c5", "validation losses"),
    "save_blocking": ("c3", "waiting for a checkpoint's copy to the host"),
    "data_wait": ("c6", "waiting for data"),
    "compile": ("c2", "compilation by XLA"),
    "start_up": ("c1", "imports, devices, data"),
    "restore": ("c4", "loading a checkpoint"),
    "lost": ("bad", "steps repeated after a restart"),
    "down": ("c7", "between two starts"),
}


def light(name: str) -> str:
    """A colour of the light theme."""
    return COLOURS[name][0]


def css_variables(theme: int) -> str:
    """The colours of the light theme (0) or the dark one (1) as variables of a style sheet: `--ink:#1c2530;...`."""
    return "".join(f"--{name}:{colours[theme]};" for name, colours in COLOURS.items())
