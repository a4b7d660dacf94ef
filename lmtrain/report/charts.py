"""What is plotted: one row per plot, with its metrics. Other metrics are left out."""

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
