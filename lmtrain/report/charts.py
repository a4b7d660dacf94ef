"""What is plotted (one row per plot, with its metrics; other metrics are left out), and in which colors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

MAX_METRICS = 16  # that one plot can show


@dataclass(frozen=True)
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
    Chart("loss", "Training loss", "nats per token", "train/loss"),
    Chart("eval-loss", "Evaluation loss", "nats per token", r"eval/(.+/)?(macro_)?loss"),
    Chart("eval-bpb", "Evaluation, bits per byte", "bits per byte", r"eval/(.+/)?(macro_)?bpb"),
    Chart("eval-other", "Other evaluations", "", r"eval/(?!(.+/)?(macro_)?(loss|bpb)$|(ema/)?tokens$).+"),
    Chart("learning-rate", "Learning rate", "", "train/learning_rate", from_zero=True),
    Chart("gradient-norm", "Gradient norm", "", "train/gradient_norm", from_zero=True),
    Chart("parameter-norm", "Parameter norm", "", "params/norm/total"),
    Chart("expert-load", "Load of experts", "relative to the mean", r"moe/(max|min|max_device)_load", from_zero=True),
    Chart("layer-load", "Most used expert of a layer", "relative to the mean", "moe/max_load/.+", compared=1),
    Chart("dead-experts", "Experts without a token", "in all layers", "moe/dead_experts", from_zero=True),
    Chart("router-losses", "Losses of the routers", "without coefficients", r"moe/(balance|z)_loss", compared=1),
    Chart("router-entropy", "Entropy of the routers", "nats", "moe/router_entropy"),
    Chart("skipped-steps", "Updates skipped so far", "", "optim/skipped_steps", from_zero=True),
    Chart("throughput", "Throughput", "tokens per second", "throughput/tokens_per_second", from_zero=True),
    Chart("mfu", "Model FLOPs utilization", "percent", r"throughput/mfu(_causal)?", from_zero=True, compared=1),
    Chart("step-time", "Time of a step", "seconds", r"throughput/(duration|\w+_time)", from_zero=True, compared=1),
    Chart("saving", "Training waits for a save", "seconds", "checkpoint/blocking_seconds", from_zero=True),
    Chart("memory", "Peak memory", "bytes", r"memory/(.+/)?(.+_)?peak_bytes", from_zero=True, compared=2),
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
