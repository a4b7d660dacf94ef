"""Which plots a report has, and the data of its charts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from report.made import read, training, write_complete, write_log

from lmtrain.report.charts import is_wanted
from lmtrain.report.draw import draw, to_png
from lmtrain.report.plots import choose_plots, plot_data, run_data, seconds_by_step, tokens_by_step


def test_one_run_has_a_plot_per_chart_with_its_restarts(tmp_path):
    write_complete(tmp_path)
    plots, left_out = choose_plots([read(tmp_path)])
    named = {plot.name: [line.label for line in plot.lines] for plot in plots}
    assert named == {
        "loss": ["train/loss"],
        "eval-loss": ["eval/loss", "eval/books/loss", "eval/code/loss"],
        "eval-bpb": ["eval/bpb"],
        "learning-rate": ["train/learning_rate"],
        "gradient-norm": ["train/gradient_norm"],
        "throughput": ["throughput/tokens_per_second"],
        "step-time": ["throughput/duration"],
    }
    assert all(plot.restarts == [(20, None)] and plot.last_step == 40 for plot in plots)
    assert left_out == []


def test_file_names_are_plain_and_distinct_for_any_name_of_a_data_set(tmp_path):
    lines = [{"step": 1, "eval/../../etc/loss": 1.0, "eval/.. /../etc/loss": 1.0, "eval/é/loss": 1.0}]
    for run in ("a", "b"):
        write_log(tmp_path, run, lines)
    names = [plot.name for plot in choose_plots([read(tmp_path, "a"), read(tmp_path, "b")])[0]]
    assert sorted(names) == ["eval-loss-eval-etc-loss", "eval-loss-eval-etc-loss-2", "eval-loss-eval-loss"]


def test_metrics_beyond_the_limit_of_a_plot_are_noted(tmp_path):
    sets = {f"eval/{number}/loss": 1.0 for number in range(30)}
    write_log(tmp_path, "one", [{"step": 1, "eval/loss": 1.0, **sets}])
    plots, left_out = choose_plots([read(tmp_path)])
    assert len(plots[0].lines) == 16
    assert plots[0].lines[0].label == "eval/loss"
    assert left_out == ["Evaluation loss: 15 more metrics in the log, not plotted."]


def log(folder, steps, **metrics):
    write_log(folder, "one", [{"step": step, "train/loss": 1.0, **metrics} for step in steps])
    return read(folder)


@pytest.mark.parametrize(
    ("logged", "seconds", "steps", "expected"),
    [
        ([1, 2, 3], 0.5, [0, 1, 2, 3], [0, 0.5, 1, 1.5]),
        ([10, 20, 40], 2.0, [0, 10, 20, 40], [0, 20, 40, 80]),  # a missing step counts like the next one
        ([1001, 1002], 2.0, [1000, 1001, 1002], [0, 2, 4]),  # a log that starts late starts at zero
    ],
)
def test_training_time_is_the_sum_of_the_durations_of_steps(tmp_path, logged, seconds, steps, expected):
    series = seconds_by_step(log(tmp_path, logged, **{"throughput/duration": seconds}))
    assert [column.tolist() for column in series] == [steps, expected]


def test_training_time_of_a_thinned_log_is_the_sum_of_all_steps(tmp_path):
    steps, seconds = seconds_by_step(log(tmp_path, range(1, 10_001), **{"throughput/duration": 0.5}))
    assert len(steps) < 2048
    assert tokens_by_step(log(tmp_path, [2, 4], **{"throughput/total_tokens": 512}))[1].tolist() == [0, 512, 512]
    assert run_data(log(tmp_path, [1, 2])) == {"name": "one", "tokens": None, "seconds": None}
    assert seconds[-1] == pytest.approx(5000, rel=1e-3)


def test_lines_have_the_values_of_the_log_and_the_number_of_their_run(tmp_path):
    for name, offset in (("a", 0.0), ("b", 1.0)):
        write_complete(tmp_path, name, offset=offset)
    plot = choose_plots([read(tmp_path, "a"), read(tmp_path, "b")])[0][0]
    data = plot_data(plot)
    assert [(line["label"], line["run"], line["colour"]) for line in data["lines"]] == [("a", 0, "c0"), ("b", 1, "c1")]
    found = data["lines"][1]["curve"]
    assert found["steps"] == [1] * 40
    expected = [line["train/loss"] for line in training(offset=1.0) if "train/loss" in line]
    assert found["values"] == pytest.approx(expected, rel=1e-5)
    assert data["restarts"] == [{"step": 20, "run": number, "colour": f"c{number}"} for number in (0, 1)]
    assert len(json.dumps(data)) < 4000


def test_which_metrics_are_plotted():
    plotted = ["train/loss", "eval/my/set/loss", "eval/ema/accuracy/top1", "memory/device_3/peak_bytes"]
    others = ["grad/norm/blocks/0/kernel", "eval/tokens", "eval/ema/tokens", "train/loss/x", "xtrain/loss", ""]
    assert [metric for metric in plotted + others if is_wanted(metric)] == plotted


@pytest.mark.parametrize("label", [r"$\frac{$", "_hidden", "名前"])
def test_labels_are_not_interpreted_and_nan_is_a_gap(tmp_path, label, recwarn):
    write_log(tmp_path, "one", [{"step": step, "train/loss": None if step == 9 else 3.0} for step in range(1, 30)])
    (plot,) = choose_plots([read(tmp_path)])[0]
    figure = draw(replace(plot, title=label, lines=[replace(plot.lines[0], label=label)] * 2))
    to_png(figure)
    assert not recwarn.list
    assert np.isnan(figure.axes[0].get_lines()[0].get_ydata()).sum() == 1
