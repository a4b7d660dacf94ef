"""Which metrics are plotted, and in which chart."""

import pytest

from lmtrain.report.charts import CHARTS, is_wanted, metrics_of


def chart(name: str):
    return next(chart for chart in CHARTS if chart.name == name)


@pytest.mark.parametrize(
    "metric",
    [
        "train/loss",
        "eval/loss",
        "eval/my/set/loss",
        "eval/macro_bpb",
        "eval/ema/books/bpb",
        "eval/accuracy/top1",
        "eval/ema/accuracy/top1",
        "throughput/mfu",
        "memory/device_3/peak_bytes",
        "memory/host_peak_bytes",
        "moe/max_device_load",
        "moe/max_load/blocks/3",
    ],
)
def test_plotted_metrics(metric):
    assert is_wanted(metric)


@pytest.mark.parametrize(
    "metric",
    [
        "grad/norm/blocks/0/kernel",
        "params/norm/embed",
        "eval/tokens",
        "eval/ema/tokens",
        "train/loss/x",
        "xtrain/loss",
        "",
    ],
)
def test_metrics_that_are_not_plotted(metric):
    assert not is_wanted(metric)


def test_losses_of_all_data_sets_together_come_first():
    metrics = ["eval/a/loss", "train/loss", "eval/macro_loss", "eval/loss", "eval/bpb", "eval/loss"]
    assert metrics_of(chart("eval-loss"), metrics) == ["eval/loss", "eval/macro_loss", "eval/a/loss"]
