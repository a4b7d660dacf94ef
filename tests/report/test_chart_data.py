"""Data of the charts: tokens and training time by step, and points as drawn."""

import json

import pytest
from report.made import read, training, write_complete, write_log

from lmtrain.report.plots import choose_plots, plot_data, run_data, seconds_by_step, tokens_by_step


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
    assert seconds[-1] == pytest.approx(5000, rel=1e-3)


def test_tokens_are_as_logged(tmp_path):
    series = tokens_by_step(log(tmp_path, [2, 4], **{"throughput/total_tokens": 512}))
    assert [column.tolist() for column in series] == [[0, 2, 4], [0, 512, 512]]


def test_a_log_without_throughput_has_steps_only(tmp_path):
    assert run_data(log(tmp_path, [1, 2])) == {"name": "one", "tokens": None, "seconds": None}


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


def test_a_noisy_line_has_measured_and_smoothed_values_and_nan_is_null(tmp_path):
    noisy = [{"step": step, "train/loss": 3.0 + 0.5 * (step % 2)} for step in range(1, 301)]
    noisy[99]["train/loss"] = None
    write_log(tmp_path, "one", noisy)
    plot = choose_plots([read(tmp_path)])[0][0]
    line = plot_data(plot)["lines"][0]
    assert line["smoothed"]
    assert line["faint"]["values"][98:101] == [3.5, None, 3.5]
    assert len(line["curve"]["values"]) == 299
    assert line["bad"] == [100]


def test_bytes_are_in_gib(tmp_path):
    run = log(tmp_path, [1, 2], **{"memory/device_0/peak_bytes": 3 * 2**30})
    plot = next(plot for plot in choose_plots([run])[0] if plot.name == "memory")
    data = plot_data(plot)
    assert (data["unit"], data["lines"][0]["curve"]["values"]) == ("GiB", [3.0, 3.0])
    assert 2 < data["y"][1] < 4


def test_the_range_of_a_nearly_constant_curve_is_not_empty(tmp_path):
    write_log(tmp_path, "one", [{"step": step, "train/loss": 1 + 1e-9 * step} for step in range(1, 31)])
    plot = choose_plots([read(tmp_path)])[0][0]
    low, high = plot_data(plot)["y"]
    assert 0 < high - low < 1e-7
