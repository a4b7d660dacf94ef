"""The main figures of a report."""

import math

import pytest
from report.made import read, training, write_complete, write_log

from lmtrain.report.tables import format_value, summarize


def figures(run) -> dict[str, tuple[str, str]]:
    return {name: (cell.value, cell.note) for name, cell in summarize(run).items()}


def test_a_complete_run(tmp_path):
    path = write_complete(tmp_path)
    path.write_text(path.read_text() + '{"step": 40, "throughput/mfu": 41.25, "throughput/total_tokens": 5120}\n')
    found = figures(read(tmp_path))
    assert found["steps done"] == ("40", "of 40")
    assert found["parameters"] == ("1,234,567", "")
    assert found["tokens seen"] == ("5,120", "")
    assert found["last train loss"][0] == "3.0020"
    assert found["best eval loss"] == ("3.1020", "at step 40")
    assert found["tokens/s"] == ("5,020", "median")
    assert found["MFU"] == ("41.2 %", "median")
    assert found["wall time"] == ("4m10s", "")
    assert found["goodput"] == ("52.0 %", "of the wall time")
    assert found["starts"] == ("2", "")


def test_best_is_the_lowest_value(tmp_path):
    losses = [(10, 4.0), (20, 3.0), (30, None), (40, 3.5)]
    lines = [{"step": step, "eval/loss": loss} for step, loss in losses]
    write_log(tmp_path, "one", [*training(5), *lines])
    found = figures(read(tmp_path))
    assert found["best eval loss"] == ("3.0000", "at step 20")
    assert found["last eval loss"] == ("3.5000", "at step 40")
    write_log(tmp_path, "one", [*training(5), *lines[:3]])
    assert figures(read(tmp_path))["last eval loss"] == ("NaN or infinite", "at step 30")


def test_without_a_ledger_wall_time_is_the_sum_of_steps(tmp_path):
    write_log(tmp_path, "one", training(40))
    found = figures(read(tmp_path))
    assert found["wall time"] == ("20s", "steps only")
    assert found["goodput"] == found["starts"] == ("", "")


@pytest.mark.parametrize(
    ("tokens", "text"), [(999_999_999, "999,999,999"), (10_485_760_000, "10.49 B"), (15e12, "15 T")]
)
def test_large_numbers_are_short(tmp_path, tokens, text):
    write_log(tmp_path, "one", [*training(5), {"step": 5, "throughput/total_tokens": tokens}])
    assert figures(read(tmp_path))["tokens seen"] == (text, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.14159, "3.1416"), (123456.7, "123,457"), (6e-4, "6.000e-04"), (0.0, "0.0000"), (math.inf, "NaN or infinite")],
)
def test_values_as_text(value, text):
    assert format_value(value) == text
