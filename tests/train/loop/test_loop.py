"""The order of what happens in a run, and how it ends; with a program that computes nothing."""

import itertools
import math
import os
import signal

import jax
import pytest

from lmtrain.runtime.logging import Processes
from lmtrain.runtime.signals import StoppedError
from lmtrain.train.loop.reporter import DivergedError


def between(events: list[str], first: str, last: str) -> list[str]:
    return events[events.index(first) : events.index(last) + 1]


def kinds(events: list[str], *names: str) -> list[str]:
    return [event for event in events if event.split()[0] in names]


def test_the_metrics_of_a_step_are_read_while_the_next_one_is_running(fake_run):
    run = fake_run(4)
    assert run.train()
    assert run.events[: run.events.index("log loss 3") + 1] == [
        "compile 2",
        *("step 1", "log loss 1"),  # whether steps are long is not known yet
        *("step 2", "step 3", "log loss 2", "step 4", "log loss 3"),
    ]


def test_with_long_steps_each_one_finishes_before_the_next_one_starts(fake_run):
    run = fake_run(3)
    run.seconds = 60.0
    run.train()
    assert kinds(run.events, "step", "log")[:6] == [
        *("step 1", "log loss 1", "step 2", "log loss 2", "step 3", "log loss 3"),
    ]


def test_within_a_step_metrics_come_first_then_evaluation_then_export_then_the_checkpoint(fake_run):
    run = fake_run(6, evaluate_every=2, export_every=2, checkpointer={"keep": [{"every": 2}], "save_interval": None})
    assert run.train()
    assert between(run.events, "step 4", "step 5") == [
        *("step 4", "log loss 3", "log loss 4", "evaluate 4", "log eval/loss 4", "export 4"),
        *("sync", "save 4 permanent", "exported", "log checkpoint/blocking_seconds 4", "step 5"),
    ]


def test_the_last_step_is_evaluated_exported_and_saved_before_the_run_ends(fake_run):
    run = fake_run(3, evaluate_every=100, export_every=100)
    assert run.train()
    assert kinds(run.events, "evaluate", "export", "save", "save_now") == [
        *("evaluate 3", "export 3", "save_now 3 permanent"),
    ]
    assert run.events[-3:] == ["close", "exports finished", "finish"]
    assert run.checkpointer.saved[3] == {
        "run": "info",
        "best_step": None,
        "parts": {"params": "params", "optimizer": "moments"},
    }


def test_a_resumed_run_starts_after_its_step_with_what_was_missed(fake_run):
    run = fake_run(4, evaluate_every=2, export_every=2, missed=(2,))
    assert run.train(first_step=2, evaluation_pending=True)
    assert kinds(run.events, "evaluate", "export", "step") == [
        *("export 2", "evaluate 2", "step 3", "step 4", "evaluate 4", "export 4"),
    ]


def test_a_run_that_only_lacks_its_evaluation_does_no_step(fake_run):
    run = fake_run(4, evaluate_every=4)
    assert run.train(first_step=4, evaluation_pending=True)
    assert kinds(run.events, "evaluate", "step", "save") == ["evaluate 4"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_that_the_clock_requests_is_temporary(fake_run, processes):
    """Several processes learn of it from the step, whose outputs are read a step later."""
    run = fake_run(6, processes=Processes(0, processes))
    run.at["step 3"] = lambda: setattr(run.checkpointer, "is_due", True)
    run.train()
    saved = {1: 3, 2: 5}[processes]
    assert kinds(run.events, "save", "save_now") == [f"save {saved} temporary", "save_now 6 permanent"]


def test_a_stop_request_ends_the_run_after_the_step_with_a_complete_checkpoint(fake_run):
    run = fake_run(6, export_every=100)
    run.at["step 3"] = lambda: setattr(run.stop, "requested", True)
    assert not run.train()
    assert kinds(run.events, "step", "save_now", "export") == ["step 1", "step 2", "step 3", "save_now 3 temporary"]
    assert "log loss 3" in run.events


@pytest.mark.parametrize("during", ["export 2", "log eval/loss 2"])
def test_a_stop_request_during_an_evaluation_or_an_export_counts_for_the_same_step(fake_run, during):
    run = fake_run(6, evaluate_every=2, export_every=2)
    run.at[during] = lambda: setattr(run.stop, "requested", True)
    assert not run.train()
    assert kinds(run.events, "step", "save", "save_now") == ["step 1", "step 2", "save_now 2 temporary"]


def test_an_interrupted_evaluation_is_marked_as_pending_and_nothing_of_it_is_logged(fake_run, caplog):
    run = fake_run(6, evaluate_every=2)
    run.at["evaluate 2"] = lambda: setattr(run.stop, "requested", True)
    with caplog.at_level("INFO"):
        assert not run.train()
    assert kinds(run.events, "step", "save_now") == ["step 1", "step 2", "save_now 2 temporary"]
    assert run.checkpointer.saved[2]["evaluation_pending"]
    assert "eval/loss" not in run.logged[2]
    assert "evaluation after step 2 interrupted; it is repeated when the run resumes" in caplog.text


def test_the_last_step_is_not_complete_if_its_evaluation_was_interrupted(fake_run):
    run = fake_run(2, evaluate_every=2)
    run.at["evaluate 2"] = lambda: setattr(run.stop, "requested", True)
    assert not run.train()
    assert run.checkpointer.saved[2]["evaluation_pending"]


def test_early_stopping_ends_the_run_as_its_last_step_does(fake_run):
    stopping = {"early_stopping": {"patience": 2}}
    run = fake_run(100, evaluate_every=2, export_every=50, values=[3.0, 2.0, 2.5, 2.5], **stopping)
    assert run.train()
    assert kinds(run.events, "export", "save", "save_now") == ["export 8", "save_now 8 permanent"]
    assert run.checkpointer.saved[8]["decisions"]["stop"]["waited"] == 2


def test_the_best_checkpoint_is_saved_and_named_in_later_ones(fake_run):
    checkpointer = {"keep": [], "save_interval": None, "keep_best": {}}
    run = fake_run(6, evaluate_every=2, values=[3.0, 2.0, 2.5], checkpointer=checkpointer)
    run.train()
    assert kinds(run.events, "save", "save_now") == ["save 2 temporary", "save 4 temporary", "save_now 6 permanent"]
    assert [saved["best_step"] for saved in run.checkpointer.saved.values()] == [2, 4, 4]


@pytest.mark.parametrize(
    ("first_step", "at", "processes", "saved"),
    [(0, 3, 1, ["save_now 2 temporary"]), (2, 3, 1, []), (0, 3, 2, [])],
    ids=["saves the steps of this start", "before its first step", "several processes"],
)
def test_a_stop_while_waiting_for_data_saves_what_a_process_alone_can(fake_run, first_step, at, processes, saved):
    run = fake_run(6, processes=Processes(0, processes))

    def batches_of_finished_shards():
        yield from itertools.islice(run.batches(first_step), at - 1 - first_step)
        raise StoppedError

    assert not run.train(first_step=first_step, batches=batches_of_finished_shards())
    assert kinds(run.events, "save", "save_now") == saved
    assert kinds(run.events, "step") == [f"step {step}" for step in range(first_step + 1, at)]


@pytest.mark.parametrize(("processes", "closed"), [(1, True), (2, True)])
def test_a_loss_that_is_not_finite_ends_the_run_before_a_save(fake_run, processes, closed):
    run = fake_run(6, processes=Processes(0, processes), checkpointer={"keep": [{"every": 3}], "save_interval": None})
    run.losses[3] = math.nan
    with pytest.raises(DivergedError, match=r"step 3 is nan.*sequences 4 to 5 of the training data"):
        run.train()
    assert not run.checkpointer.saved
    assert ("close" in run.events) is closed
    assert run.events[-1] == "finish"


@pytest.mark.parametrize(("processes", "closed"), [(1, True), (2, False)])
def test_after_an_error_a_process_does_not_wait_for_others(fake_run, processes, closed):
    run = fake_run(6, processes=Processes(0, processes))

    def fail():
        raise RuntimeError("a device is lost")

    run.at["step 3"] = fail
    with pytest.raises(RuntimeError, match="a device is lost"):
        run.train()
    assert ("close" in run.events) is closed
    assert run.events[-1] == "finish"


def test_before_a_new_batch_size_is_compiled_the_running_step_is_reported(fake_run):
    run = fake_run(4, train_batch_size=[{"start": 0, "value": 2}, {"start": 2, "value": 4}])
    run.train()
    assert between(run.events, "step 2", "step 3") == ["step 2", "log loss 2", "compile 4", "step 3"]
    assert [step for step, metrics in run.logged.items() if "compile/seconds" in metrics] == [1, 3]


def test_signals_end_the_process_until_the_first_step_has_run_and_again_after_the_loop(fake_run):
    run = fake_run(3)
    handlers = []
    for event in ("compile 2", "step 2"):
        run.at[event] = lambda: handlers.append(signal.getsignal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    run.train()
    assert handlers[0] == before != handlers[1]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_requests_the_stop(fake_run):
    run = fake_run(6)
    run.at["step 3"] = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    assert not run.train()
    assert kinds(run.events, "save_now") == ["save_now 3 temporary"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(4, ["step 3", "traced", "artifact profile", "step 4", "close"]), (2, ["close", "traced", "artifact profile"])],
)
def test_a_profile_is_written_when_its_last_step_is_finished_or_the_run_ends(
    fake_run, monkeypatch, tmp_path, steps, expected
):
    run = fake_run(steps, profiler={"start_step": 1, "num_steps": 2})
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: run.happens("trace"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: run.happens("traced"))
    run.train(folder=str(tmp_path))
    events = kinds(run.events, "step", "trace", "traced", "artifact", "close")
    assert events == ["step 1", "trace", "step 2", *expected]
