"""Verdicts and figures of a plan as text and as JSON."""

import pytest
from plan.workers import request

from lmtrain.plan.report import advice_lines, as_json, memory_lines, step_lines, verdict
from lmtrain.plan.request import Plan
from lmtrain.plan.search import Search, Trial
from lmtrain.runtime.accelerators import ACCELERATORS

H100 = ACCELERATORS["h100"]
GIB = 2**30
REFUSED = {"step": "train", "does_not_fit": "RESOURCE_EXHAUSTED\n\n  too large\n  a\n  b"}


def plan(state: float, *peaks: float) -> Plan:
    program = {"state": {"params": int(state * GIB)}, "advice": ["trainer.per_device_parallelism: 1", "more devices"]}
    program |= dict.fromkeys(("device", "devices", "mesh", "attention", "parameters", "microbatches"), "x")
    return Plan(program, {str(number): {"memory": {"peak": peak * GIB}} for number, peak in enumerate(peaks)})


@pytest.mark.parametrize(
    ("planned", "text"),
    [
        (plan(1, 2, 3), "fits: 3.0 GiB of 73.6 GiB of NVIDIA H100 (by the compiler)"),
        (plan(1, 147.2), "does not fit: 147.2 GiB, 2 times 73.6 GiB of NVIDIA H100 (by the compiler)"),
        (plan(147.2), "does not fit: 147.2 GiB, 2 times 73.6 GiB of NVIDIA H100 (by the training state alone)"),
        (plan(1), "unknown whether it fits: the training state needs 1.0 GiB of 73.6 GiB of NVIDIA H100, and a step"),
        (Plan({}, {"train": REFUSED}), "does not fit into 73.6 GiB of NVIDIA H100 (by the compiler)"),
    ],
)
def test_the_verdict_names_what_is_needed_and_who_says_so(planned, text):
    assert verdict(planned, H100).startswith(text)
    assert verdict(planned, None).startswith("unknown whether it fits: add a kind of device")


def test_memory_is_a_bar_of_arguments_peak_and_rest():
    memory = {"arguments": 18.4 * GIB, "peak": 36.8 * GIB, "temporary": 20 * GIB, "host": 0}
    figures, bar, legend = memory_lines({"memory": memory}, H100)
    assert figures.endswith("arguments 18.4 GiB, live peak 36.8 GiB, temporary buffers 20.0 GiB")
    assert bar.strip() == f"[{'#' * 10}{'+' * 10}{'.' * 20}] 50 % of 73.6 GiB"
    assert "# arguments" in legend
    (on_tpu, *_) = memory_lines({"memory": memory | {"host": GIB}}, ACCELERATORS["v5e"])
    assert on_tpu.endswith("with fragments, in host memory 1.0 GiB")


def test_a_refused_step_has_the_first_lines_of_the_compiler():
    assert list(step_lines(REFUSED, H100)) == [
        *("", "training step: does not fit, refused by the compiler"),
        *("  RESOURCE_EXHAUSTED", "  too large", "  a"),
    ]


def test_advice_has_the_largest_setting_that_fits_in_place_of_the_general_one():
    search = Search(request=request(), capacity=None, timeout=1.0)
    none = "no value of per_device_parallelism and gradient_checkpointing fits these devices; use more devices"
    assert list(advice_lines(plan(1), None))[-2:] == ["  trainer.per_device_parallelism: 1", "  more devices"]
    assert next(advice_lines(plan(1), search)) == none
    search.best = Trial(
        name="smaller", changes={"trainer.per_device_parallelism": 4}, seconds=1.0, peak=2 * GIB, fits=True
    )
    assert list(advice_lines(plan(1), search)) == [
        "largest that fits (2.00 GiB by the compiler): smaller",
        *("  trainer:", "    per_device_parallelism: 4", "what to reduce, most effective first:", "  more devices"),
    ]


def test_without_a_compiled_step_its_figures_are_null_in_json():
    values = as_json(plan(100), H100, request().target)
    assert (values["fits"], values["fits_by"], values["flops"], values["collectives"]) == (False, "state", None, [])
    assert values["memory"]["state"] == 100 * GIB
