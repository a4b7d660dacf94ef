"""Rates between finished steps, with a clock that the test controls."""

import pytest

from lmtrain.data.config import BatchSizes
from lmtrain.tracking.goodput import COMPILE, DATA, EVALUATION, HOOKS, SAVING, Timer
from lmtrain.train.loop.reporter import Throughput
from lmtrain.train.program.compile import ModelFlops

# 1000 tokens per second are 2 % of the peak, and 1.5 % if attention counts as half
KNOWN = ModelFlops(flops_per_token=2e6, causal_flops_per_token=1.5e6, peak_flops=1e11)
UNKNOWN = ModelFlops(2e6, 1.5e6, None)
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
    return Throughput(KNOWN, SEQ_LEN, timer)


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
    known, unknown = (step(Throughput(flops, SEQ_LEN, timer), clock, 0.0, 1.0, so_far=10) for flops in (KNOWN, UNKNOWN))
    assert known.keys() - unknown.keys() == {"throughput/mfu", "throughput/mfu_causal"}
    assert unknown == {name: known[name] for name in unknown}
    throughput = Throughput(UNKNOWN, SEQ_LEN, timer)
    for _ in range(3):
        step(throughput, clock, 0.0, 1.0)
    assert throughput.summary == "1,000 tokens/s, 1000 ms a step, waiting for data 0.00 % of it"


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


def test_waiting_for_data_is_not_part_of_the_seconds_that_decide_whether_steps_are_long(throughput, clock):
    step(throughput, clock, 60.0, 2.0)
    assert throughput.last_step_seconds == pytest.approx(2.0)


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
