"""What is reported of steps and evaluations: to the trackers, the ledger and the progress display."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.evaluation.run import Findings
from lmtrain.runtime.errors import RunError
from lmtrain.train.loop.reporter import DivergedError, Reporter


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
