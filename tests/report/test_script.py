"""The arithmetic of the page's script: ticks, ranges, numbers, paths."""

import json

import pytest
from py_mini_racer import mini_racer

from lmtrain.report.page import script


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("linearTicks(0, 100, 5)", [0, 20, 40, 60, 80, 100]),
        ("linearTicks(-0.01, 1.01, 5)", [0, 0.25, 0.5, 0.75, 1]),
        ("linearTicks(0, 3, 6)", [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        ("logTicks(1, 1e9, 5)", [1, 100, 10000, 1000000, 100000000]),
        ("logTicks(0.9, 21, 6)", [1, 2, 5, 10, 20]),
        ("logTicks(3, 4, 5)", [3, 3.2, 3.4, 3.6, 3.8, 4]),
        ("rangeOf([[-1, 0, 2, NaN], [8]], true, 0)", [2, 8]),
        ("rangeOf([[NaN]], true, 0.1)", [1, 10]),
        ("rangeOf([[3, 3]], false, 0.1)", [0, 6]),
        ("[1e6, 1234.5, 0.123456, 1e-5, 0, -1500, NaN].map(formatNumber)",
         ["1,000,000", "1,235", "0.1235", "1e-5", "0", "-1,500", "NaN or infinite"]),
        ("[0, 999, 2048, 15e12].map(formatCount)", ["0", "999", "2.048 K", "15 T"]),
        ("[1, 119, 120, 7200, 2e5].map((each) => durationUnit(each)[1])",
         ["seconds", "seconds", "minutes", "hours", "days"]),
        ("[-5, 0, 5, 15, 99].map((step) => valueAt({steps: [0, 10, 20], values: [0, 100, 300]}, step))",
         [0, 0, 50, 200, 300]),
        ("pathOf([0, 1, NaN, 3, 4], [0, 1, 2, 3, NaN])", "M0.0 0.0L1.0 1.0M3.0 3.0"),
        ("nearestPoint([{xs: [NaN, 0], ys: [0, 0]}, {xs: [5], ys: [5]}], 4, 3).line.xs", [5]),
        ("nearestPoint([{xs: [NaN], ys: [0]}], 4, 3)", None),
        ("decode({steps: [5, 2, 1], values: [1, 2, 3]}).steps", [5, 7, 8]),
    ],
)  # fmt: skip
def test_arithmetic(expression, value):
    with mini_racer() as engine:
        engine.eval(script().replace("\nstart();", ""))
        assert json.loads(engine.eval(f"JSON.stringify({expression})")) == value
