"""Rates between finished steps, with a clock that the test turns."""

import pytest

from lmtrain.train import throughput as module
from lmtrain.train.throughput import Throughput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def step(throughput: Throughput, clock: Clock, loading: float, computing: float) -> dict[str, float]:
    with throughput.loading:
        clock.now += loading
    clock.now += computing
    return throughput.step_done(1000)


def test_a_step_reports_its_duration_its_waiting_and_its_rate(clock):
    throughput = Throughput()
    step(throughput, clock, 1.0, 9.0)
    assert step(throughput, clock, 0.5, 1.5) == pytest.approx(
        {"throughput/duration": 2.0, "throughput/loading_time": 0.5, "throughput/tokens_per_second": 500.0}
    )


def test_a_pause_is_not_part_of_a_step(clock):
    throughput = Throughput()
    step(throughput, clock, 0.0, 1.0)
    clock.now += 60.0
    throughput.resume_clock()
    assert step(throughput, clock, 0.0, 2.0)["throughput/duration"] == pytest.approx(2.0)


def test_the_summary_leaves_the_first_two_steps_out(clock):
    throughput = Throughput()
    for loading, computing in [(5.0, 50.0), (0.0, 20.0), (0.1, 1.9), (0.3, 1.7)]:
        step(throughput, clock, loading, computing)
    assert throughput.summary == "500 tokens/s, 2000 ms a step, waiting for data 10.00 % of it"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_have_no_summary(clock, steps):
    throughput = Throughput()
    for _ in range(steps):
        step(throughput, clock, 0.0, 1.0)
    assert throughput.summary == ""


def test_a_stopwatch_counts_even_what_ends_in_an_exception(clock):
    watch = module.Stopwatch()

    def fail():
        with watch:
            clock.now += 2.0
            raise StopIteration

    with pytest.raises(StopIteration):
        fail()
    assert watch.reset() == 2.0
    assert watch.seconds == 0.0
