"""Reports of finished steps, their rates and the memory in use."""

import math
import resource
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.data.config import BatchSizes
from lmtrain.evaluation.run import Findings
from lmtrain.runtime.errors import RunError
from lmtrain.tracking.goodput import COMPILE, DATA, EVALUATION, HOOKS, SAVING, Timer
from lmtrain.train.loop import reporter as module
from lmtrain.train.loop.reporter import DivergedError, Reporter, Throughput, memory_in_use
from lmtrain.train.program.compile import ModelFlops


class FakeDue:
    """Has the next evaluation and checkpoint at known steps, and records what it learns."""

    def __init__(self):
        self.learned = []

    def learn(self, step, requests, seconds):
        self.learned.append((step, requests, round(seconds, 2)))

    def next_evaluation(self, step):
        return 50

    def next_save(self, step, seconds_per_step):
        return step + 10


class Running:
    """A value that the device has not computed when it is asked for."""

    def __init__(self, value):
        self._value = value

    def is_ready(self):
        return False

    def __array__(self):
        return np.float32(self._value)


class FakeConsole:
    def __init__(self):
        self.shown, self.evaluated = [], []
        self.show, self.show_evaluation = self.shown.append, self.evaluated.append


class Case:
    """A reporter of a run, and what it reports to."""

    def __init__(self, run, first_step=0):
        self.run, self.due, self.console = run, FakeDue(), FakeConsole()
        run.timer.begin_steps()
        self.reporter = Reporter(run.reporting(), run.program, self.due, self.console, first_step, lambda: "tokenizing")

    def step(self, step, loss=1.0, seconds=1.0, requests=None, ends=False, **more):
        """A step of `seconds`, reported at once."""
        self.run.clock.now += seconds
        metrics = {"train/loss": Running(loss), "train/learning_rate": jnp.float32(0.5), **more}
        self.reporter.report(keep=(step, metrics, requests))
        self.reporter.report(ends=ends)


@pytest.fixture
def case(fake_run):
    return Case(fake_run(100))


def test_a_step_is_logged_with_its_speed_and_what_was_added_to_it(case):
    case.reporter.add({"compile/seconds": 3.0})
    case.step(1, loss=2.5, seconds=2.0)
    case.step(2)
    logged = case.run.logged
    assert logged[1]["train/loss"] == 2.5
    assert logged[1]["compile/seconds"] == 3.0
    assert logged[1]["throughput/duration"] == pytest.approx(2.0)
    assert logged[2]["throughput/total_tokens"] == 2 * 2 * 10
    assert "compile/seconds" not in logged[2]
    assert {type(value) for value in logged[1].values()} <= {float, int}


def test_a_report_is_that_of_the_pending_step_only(case):
    case.reporter.report()
    case.reporter.report(keep=(1, {"train/loss": jnp.float32(1), "train/learning_rate": jnp.float32(1)}, None))
    assert case.run.logged == {}
    case.run.clock.now += 1.0
    case.reporter.report()
    case.reporter.report()
    assert case.run.events == ["log loss 1"]


def test_requests_and_the_seconds_of_a_step_are_learned(case):
    case.step(1, seconds=3.0, requests=np.array([1, 0, 0]))
    ((step, requests, seconds),) = case.due.learned
    assert (step, requests.tolist(), seconds) == (1, [1, 0, 0], 3.0)


def test_norms_are_logged_by_name_in_the_steps_that_compute_them(fake_run):
    case = Case(fake_run(100, watch={"watch_targets": ["grads"], "interval": 2}))
    norms = {"grads": {"total": jnp.float32(3.0), "layers": {"blocks": jnp.ones(2)}, "parameters": {}}}
    for step in (1, 2):
        case.step(step, watch=dict(norms))
    assert not [name for name in case.run.logged[1] if "norm" in name]
    assert {name: value for name, value in case.run.logged[2].items() if "norm" in name} == {
        "grad/norm/total": 3.0,
        "grad/norm/blocks/0": 1.0,
        "grad/norm/blocks/1": 1.0,
    }


def test_goodput_and_memory_are_logged_about_every_ten_seconds_and_once_at_the_end(case):
    for step in range(1, 8):
        case.step(step, seconds=6.0)
    case.reporter.report_end(7)
    steps = [step for step, metrics in case.run.logged.items() if "goodput/steps" in metrics]
    assert steps == [2, 4, 6, 7]
    assert all("memory/host_peak_bytes" in case.run.logged[step] for step in steps)
    case.step(8, seconds=12.0)
    case.reporter.report_end(8)
    assert case.run.events[-2:] == ["log goodput/compile 7", "log loss 8"]


def test_the_last_step_has_the_goodput_of_the_end(case):
    case.step(1, seconds=60.0, ends=True)
    assert "goodput/steps" not in case.run.logged[1]
    case.reporter.report_end(1)
    assert "goodput/steps" in case.run.logged[1]


def test_a_run_that_trains_no_step_logs_nothing_at_its_end(fake_run):
    case = Case(fake_run(100), first_step=7)
    case.reporter.report_end(7)
    assert case.run.events == []


@pytest.mark.parametrize(
    ("loss", "settings", "ends"),
    [
        (math.nan, {}, True),
        (math.inf, {}, True),
        (-math.inf, {}, True),
        (math.nan, {"crash_on_nan": False}, False),
        (math.inf, {"crash_on_nan": False}, True),
        (math.inf, {"crash_on_inf": False}, False),
        (math.nan, {"crash_on_inf": False}, True),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run_after_it_is_logged(fake_run, loss, settings, ends):
    case = Case(fake_run(100, **settings))
    case.step(1)
    if not ends:
        case.step(2, loss=loss)
        return
    with pytest.raises(DivergedError, match=r"the loss of step 2 is -?(nan|inf); .* sequences 2 to 3 of the") as raised:
        case.step(2, loss=loss)
    assert isinstance(raised.value, RunError)
    assert "train/loss" in case.run.logged[2]


def test_an_evaluation_is_logged_with_its_texts_and_shown_from_then_on(case, caplog):
    case.step(1)
    with caplog.at_level("INFO"):
        case.reporter.report_evaluation(1, Findings({"eval/loss": 3.5}, ["loss 3.5"], {"Once": " upon"}))
    case.step(2)
    assert case.run.events[1:3] == ["log eval/loss 1", "text 1"]
    assert case.run.logged[1]["eval/loss"] == 3.5
    (shown,) = case.console.evaluated
    assert (shown.step, shown.loss) == (1, 3.5)
    assert [shown.evaluated for shown in case.console.shown] == [None, shown]
    assert "step 1: loss 3.5" in caplog.text


def test_an_evaluation_without_findings_logs_nothing(case):
    case.reporter.report_evaluation(1, Findings({}, [], {}))
    assert case.run.events == []
    assert case.console.evaluated == []


def test_the_display_has_the_mean_speed_of_the_last_steps_without_the_warm_up(case):
    for step, seconds in enumerate([50.0, 20.0, 2.0, 1.0], start=1):
        case.step(step, loss=step, seconds=seconds)
    assert [round(shown.seconds_per_step, 1) for shown in case.console.shown] == [50.0, 20.0, 2.0, 1.5]
    last = case.console.shown[-1]
    assert (last.step, last.loss, last.learning_rate, last.status) == (4, 4.0, 0.5, "tokenizing")
    assert (last.next_evaluation, last.next_save) == (50, 14)
    assert last.tokens_per_second == pytest.approx(20 / 1.5, rel=0.02)
    assert last.mfu == pytest.approx(100 * 1e6 * last.tokens_per_second / 1e9)
    assert case.reporter.summary.startswith("13 tokens/s, 15")


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


HOST = "memory/host_peak_bytes"


def device(number: int, stats: dict | None) -> SimpleNamespace:
    return SimpleNamespace(id=number, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"bytes_in_use": 10, "peak_bytes_in_use": 2**40, "bytes_limit": 100}, {"bytes": 10.0, "peak_bytes": 2.0**40}),
        ({"bytes_in_use": 5}, {"bytes": 5.0}),
        ({"bytes_limit": 100}, {}),
        (None, {}),
    ],
)
def test_each_device_has_the_bytes_that_it_reports_by_its_id(stats, expected):
    metrics = memory_in_use([device(0, stats), device(3, stats)])
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics.pop(HOST) > 0
    assert metrics == {f"memory/device_{number}/{name}": value for number in (0, 3) for name, value in expected.items()}


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_peak_depends_on_the_operating_system(monkeypatch, platform, unit):
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=123_456))
    assert memory_in_use([]) == {HOST: 123_456.0 * unit}
