"""The arithmetic of the page's script: ticks, ranges, numbers, paths."""

import json

import pytest
from py_mini_racer import mini_racer

from lmtrain.report.page import script


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("linearTicks(0, 100, 5)", [0, 20, 40, 60, 80, 100]),



        ("logTicks(0.9, 21, 6)", [1, 2, 5, 10, 20]),

        ("rangeOf([[-1, 0, 2, NaN], [8]], true, 0)", [2, 8]),


        ("[1e6, 1234.5, 0.123456, 1e-5, 0, -1500, NaN].map(formatNumber)",
         ["1,000,000", "1,235", "0.1235", "1e-5", "0", "-1,500", "NaN or infinite"]),


        ("[-5, 0, 5, 15, 99].map((step) => valueAt({steps: [0, 10, 20], values: [0, 100, 300]}, step))",
         [0, 0, 50, 200, 300]),
        ("pathOf([0, 1, NaN, 3, 4], [0, 1, 2, 3, NaN])", "M0.0 0.0L1.0 1.0M3.0 3.0"),


        ("decode({steps: [5, 2, 1], values: [1, 2, 3]}).steps", [5, 7, 8]),
    ],
)  # fmt: skip
def test_arithmetic(expression, value):
    with mini_racer() as engine:
        engine.eval(script().replace("\nstart();", ""))
        assert json.loads(engine.eval(f"JSON.stringify({expression})")) == value
