"""Rates between finished steps, with a clock that the test controls; and FLOPs per token."""

import re

import jax
import pytest

from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.plan.figures import describe
from lmtrain.plan.report import model_lines
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.tracking.timer import COMPILE, DATA, EVALUATION, HOOKS, SAVING, Timer
from lmtrain.train.loop.throughput import Throughput
from lmtrain.train.program.program import plan_program
from lmtrain.train.program.work import Work
from lmtrain.train.start import facts as facts_module
from lmtrain.train.start.facts import device_facts, plan_work

# 1000 tokens per second are 2 % of the peak, and 1.5 % if attention counts as half
WORK = Work(flops_per_token=2e6, causal_flops_per_token=1.5e6, peak_flops=1e11)
UNKNOWN = Work(2e6, 1.5e6, None)
SEQ_LEN = 100


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    timer = Timer(clock)
    timer.begin_steps()
    return timer


@pytest.fixture
def throughput(timer):
    return Throughput(WORK, SEQ_LEN, timer)


def step(throughput: Throughput, clock: Clock, loading: float, computing: float, so_far: int = 10) -> dict[str, float]:
    with throughput._timer.section(DATA):
        clock.now += loading
    clock.now += computing
    return throughput.step_done(10, so_far)


def test_a_step_reports_its_times_its_rates_and_the_totals_of_the_run(throughput, timer, clock):
    step(throughput, clock, 1.0, 9.0)
    with timer.section(HOOKS):
        clock.now += 0.25
    assert step(throughput, clock, 0.5, 1.25, so_far=20) == pytest.approx(
        {
            "throughput/duration": 2.0,
            "throughput/loading_time": 0.5,
            "throughput/hook_time": 0.25,
            "throughput/examples_per_second": 5.0,
            "throughput/tokens_per_second": 500.0,
            "throughput/total_tokens": 2000,
            "throughput/total_gflops": 4.0,
            "throughput/gflops_per_second": 1.0,
            "throughput/mfu": 1.0,
            "throughput/mfu_causal": 0.75,
        }
    )


def test_a_device_with_unknown_peak_has_no_mfu(timer, clock):
    known, unknown = (step(Throughput(work, SEQ_LEN, timer), clock, 0.0, 1.0, so_far=10) for work in (WORK, UNKNOWN))
    assert known.keys() - unknown.keys() == {"throughput/mfu", "throughput/mfu_causal"}
    assert unknown == {name: known[name] for name in unknown}
    throughput = Throughput(UNKNOWN, SEQ_LEN, timer)
    for _ in range(3):
        step(throughput, clock, 0.0, 1.0)
    assert throughput.summary == "1,000 tokens/s, 1000 ms a step, waiting for data 0.00 % of it"


def test_a_device_at_its_peak_has_an_mfu_of_100_percent():
    work = Work(1e12, 0.75e12, find_accelerator("NVIDIA H100 80GB HBM3").peak_flops)
    rates = work.rates(989.0)
    assert rates == pytest.approx(
        {"throughput/gflops_per_second": 989e3, "throughput/mfu": 100.0, "throughput/mfu_causal": 75.0}
    )


def test_hook_time_is_that_of_hooks_evaluations_and_saves_since_the_previous_step(throughput, timer, clock):
    for section, seconds in ((HOOKS, 1.0), (EVALUATION, 4.0), (SAVING, 8.0), (HOOKS, 2.0)):
        with timer.section(section):
            clock.now += seconds
    assert step(throughput, clock, 0.0, 1.0)["throughput/hook_time"] == pytest.approx(15.0)
    assert step(throughput, clock, 0.0, 1.0)["throughput/hook_time"] == 0.0


def test_total_tokens_follow_a_schedule_of_batch_sizes(throughput, clock):
    """As the reporter calls it: steps are counted from 0, and a resumed run includes earlier ones."""
    sizes = BatchSizes.of([(0, 2), (3, 5)])
    found = []
    for done in range(2, 7):  # resumed after one step
        clock.now += 2.0
        found.append(throughput.step_done(sizes.at(done - 1), sizes.before(done)))
    assert [metrics["throughput/total_tokens"] for metrics in found] == [400, 600, 1100, 1600, 2100]
    assert [metrics["throughput/examples_per_second"] for metrics in found] == [1.0, 1.0, 2.5, 2.5, 2.5]
    assert [metrics["throughput/tokens_per_second"] for metrics in found] == [100.0, 100.0, 250.0, 250.0, 250.0]
    assert found[-1]["throughput/total_gflops"] == pytest.approx(2100 * 2e6 / 1e9)


def test_a_step_that_finished_while_the_host_was_delayed_has_the_mean_speed_of_two(throughput, clock):
    """A suspended laptop or a slow tracker: the next step finished meanwhile."""
    step(throughput, clock, 0.0, 2.0)
    clock.now += 6.0
    late = throughput.step_done(10, 20)
    clock.now += 0.001
    rest = throughput.step_done(10, 30, waited=False)
    assert late["throughput/tokens_per_second"] == pytest.approx(1000 / 6)
    assert rest["throughput/tokens_per_second"] == pytest.approx(2000 / 6.001)
    assert rest["throughput/duration"] == pytest.approx(3.0005)
    clock.now += 2.0
    assert throughput.step_done(10, 40)["throughput/duration"] == pytest.approx(2.0)


def test_steps_count_as_long_until_a_short_one_and_waiting_for_data_does_not_count(throughput, clock):
    found = [throughput.has_long_steps]
    for loading, computing in ((0.0, 2.0), (60.0, 2.0), (0.0, 60.0), (0.0, 2.0)):
        step(throughput, clock, loading, computing)
        found.append(throughput.has_long_steps)
    assert found == [True, False, False, True, False]


def test_a_pause_is_not_part_of_a_step(throughput, timer, clock):
    step(throughput, clock, 0.0, 1.0)
    for section in (EVALUATION, SAVING, COMPILE):
        with timer.section(section):
            clock.now += 60.0
    assert step(throughput, clock, 0.0, 2.0)["throughput/duration"] == pytest.approx(2.0)


def test_the_summary_leaves_the_first_two_steps_out(throughput, clock):
    for loading, computing in [(5.0, 50.0), (0.0, 20.0), (0.1, 1.9), (0.3, 1.7)]:
        step(throughput, clock, loading, computing)
    assert throughput.summary == "500 tokens/s, 2000 ms a step, MFU 1.0 %, waiting for data 10.00 % of it"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_have_no_summary(throughput, clock, steps):
    for _ in range(steps):
        step(throughput, clock, 0.0, 1.0)
    assert throughput.summary == ""


@pytest.fixture(scope="module")
def program():
    model = {"type": "gpt2", "hidden_dim": 32, "num_heads": 2, "num_layers": 3, "seq_len": 64}
    return plan_program(RunConfig(model=model, trainer={"train_batch_size": 4}), 100)


def test_flops_per_token_are_those_of_lmtrain_plan(program):
    work = plan_work(program)
    text = "\n".join(model_lines(describe(program, "cpu"), "here", ""))
    full, causal = re.search(r"(\S+) per token, .*; (\S+) with causal attention", text).groups()
    assert (work.flops_per_token, work.causal_flops_per_token) == pytest.approx((float(full), float(causal)), rel=1e-3)
    (per_step,) = re.search(r"FLOPs +(\S+) per step", text).groups()
    assert work.flops_per_token * 4 * 64 == pytest.approx(float(per_step), rel=1e-2)


def test_flops_per_token_are_those_of_the_matrix_products_forward_and_twice_backward(program):
    """Computed by hand: qkv, out, up and down of each layer, the two attention products, and the head."""
    work = plan_work(program)
    width, length = 32, 64
    weights = 3 * (3 * width**2 + width**2 + 2 * 4 * width**2) + 100 * width
    full, causal = (6 * (weights + 3 * 2 * keys * width) for keys in (length, (length + 1) / 2))
    assert work.flops_per_token == pytest.approx(full)
    assert work.causal_flops_per_token == pytest.approx(causal)


def test_the_peak_is_that_of_all_devices_and_the_convention_is_logged(program, monkeypatch, caplog):
    h100 = find_accelerator("h100")
    monkeypatch.setattr(facts_module, "find_accelerator", lambda kind: h100)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with caplog.at_level("INFO"):
        work = plan_work(program)
    assert work.peak_flops == 8 * 989e12
    message = caplog.records[-1].message
    for part in ("MFU", "989 TFLOP/s", "NVIDIA H100", "16-bit", "per device", "mfu counts full", "mfu_causal half"):
        assert part in message
    facts = device_facts(work, 64)
    assert facts["throughput/theoretical_flops"] == 8 * 989e12
    assert facts["throughput/theoretical_flops_per_device"] == 989e12
    assert facts["throughput/flops_per_example"] == work.flops_per_token * 64


def test_an_unknown_device_logs_that_there_is_no_mfu(program, caplog):
    with caplog.at_level("INFO"):
        work = plan_work(program)  # tests run on CPUs
    assert work.peak_flops is None
    assert "unknown peak FLOP/s" in caplog.records[-1].message
    assert "MFU" in caplog.records[-1].message
    facts = device_facts(work, 64)
    assert not [name for name in facts if "theoretical" in name]
    assert facts["throughput/device_count"] == jax.device_count()
