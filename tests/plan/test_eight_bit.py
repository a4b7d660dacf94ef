"""Whether products in 8 bits pay, from the figures of two compiled steps."""

import pytest
from plan.workers import request

from lmtrain.plan.candidates import compare, lines, with_products
from lmtrain.plan.request import Plan
from lmtrain.run.execution import parse_precision

FP8 = "p=float32,c=bfloat16,q=fp8"


def figures(seconds, cycles=None):
    rows = [
        {"where": "models/layers/linear.py:68", "eight_bit": True, "flops": 3e12},
        {"where": "objectives/chunked_sums.py:1", "eight_bit": False, "flops": 1e12},
    ]
    return {"seconds": {"total": seconds}, "cycles": cycles, "products": rows, "flops": {"eight_bit": 3e12}}


def compared(monkeypatch, with_8_bits, without):
    asked = []

    def ask(request, timeout, progress):
        asked.append(request)
        return Plan({}, {"train": without})

    monkeypatch.setattr("lmtrain.plan.candidates.ask", ask)
    found = compare(request().changed({"trainer.mp": FP8}), Plan({}, {"train": with_8_bits}), 60.0)
    assert [(one.config["trainer"]["mp"], one.steps) for one in asked] == [("p=float32,c=bfloat16", ("train",))]
    return found


@pytest.mark.parametrize(
    ("small", "large", "time", "pays"),
    [
        ((0.6,), (1.0,), 0.6, True),
        ((0.95,), (1.0,), 0.95, False),
        ((1.1,), (1.0,), 1.1, False),
        ((0.5, 9.5e8), (1.0, 1e9), 0.95, False),  # a TPU's bound does not know what conversions cost
        ((0.95, 8e8), (1.0, 1e9), 0.8, True),
    ],
)
def test_they_pay_if_they_save_time_by_the_estimate_or_else_by_the_bound(monkeypatch, small, large, time, pays):
    found = compared(monkeypatch, figures(*small), figures(*large))
    assert found["time"] == pytest.approx(time)
    assert (found["format"], found["pays"]) == ("fp8", pays)
    text = "\n".join(lines(figures(*small), found))
    assert f"{time:.2f} x that with products in 16 bits, by the {'estimate' if small[1:] else 'bound'}" in text
    assert ("not advised: remove q=fp8 from trainer.mp" in text) == (not pays)


def test_the_products_of_both_kinds_are_shown_with_their_sources():
    assert list(lines(figures(1.0), None)) == [
        "  8 bits      75 %: 3 TFLOP models/layers/linear.py:68",
        "  16 or more  25 %: 1 TFLOP objectives/chunked_sums.py:1",
    ]


@pytest.mark.parametrize("missing", [{}, {"does_not_fit": "too large"}])
def test_without_figures_of_both_nothing_is_compared(monkeypatch, missing):
    assert compared(monkeypatch, figures(1.0), missing) is None
    assert compare(request(), Plan({}, {"train": figures(1.0)}), 60.0) is None  # no q
    assert compare(request().changed({"trainer.mp": FP8}), Plan({}, {"train": missing}), 60.0) is None


def test_the_setting_of_other_products_is_one_that_can_be_parsed():
    precision = parse_precision(FP8)
    assert with_products(precision, None) == "p=float32,c=bfloat16"
    assert parse_precision(with_products(precision, "int8")).products == "int8"
