"""Trackers in the background: failures and slowness do not affect training, and queued calls are not lost."""

import logging
import threading

import pytest

from lmtrain.tracking import tracker as module
from lmtrain.tracking.tracker import BackgroundTracker


class Recorder:
    """Records its calls; `log` waits for `gate`, and raises at the step `broken`; so does `artifact` for that name."""

    def __init__(self, broken=None):
        self.calls = []
        self.broken = broken
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()
        self.logged = threading.Semaphore(0)
        self.finished = threading.Event()

    def hyperparameters(self, config):
        self.calls.append(("hyperparameters", config))

    def log(self, metrics, step):
        self.busy.set()
        self.gate.wait(300)
        if step == self.broken:
            raise ConnectionError("the service is gone")
        self.calls.append(("log", metrics, step))
        self.logged.release()

    def summary(self, values):
        self.calls.append(("summary", values))

    def artifact(self, path, name, kind):
        if name == self.broken:
            raise FileNotFoundError(path)
        self.calls.append(("artifact", path, name, kind))

    def finish(self):
        self.calls.append(("finish",))
        self.finished.set()


@pytest.fixture
def warnings(caplog):
    """`warnings()` returns the warnings logged so far."""
    caplog.set_level(logging.WARNING, "lmtrain")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lmtrain"]


def log_steps(tracker, steps):
    for step in steps:
        tracker.call("log", {}, step)


def blocked(recorder, queued=0):
    """A tracker whose thread is blocked in its first call of `log`, with more calls queued."""
    recorder.gate.clear()
    tracker = BackgroundTracker("x", lambda: recorder)
    tracker.call("log", {}, 0)
    assert recorder.busy.wait(300)
    log_steps(tracker, range(1, queued + 1))
    return tracker


def test_calls_arrive_in_order_and_finish_waits_for_all_of_them(warnings):
    recorder = Recorder()
    tracker = BackgroundTracker("x", lambda: recorder)
    tracker.call("summary", {"b": 2})
    for step in range(100):
        tracker.call("log", {"c": 3.0}, step)
    tracker.call("artifact", "logs/run-1/code", "run-1-code", "code")
    tracker.finish()
    logs = [("log", {"c": 3.0}, step) for step in range(100)]
    artifact = ("artifact", "logs/run-1/code", "run-1-code", "code")
    assert recorder.calls == [("summary", {"b": 2}), *logs, artifact, ("finish",)]
    assert warnings() == []


def test_the_tracker_is_opened_by_the_first_log_and_in_its_own_thread():
    recorder, opened, threads = Recorder(), threading.Event(), []

    def open_tracker():
        threads.append(threading.current_thread())
        opened.set()
        return recorder

    tracker = BackgroundTracker("x", open_tracker)
    tracker.call("hyperparameters", {})
    tracker.call("artifact", "config.yaml", "run-1-config", "config")
    assert threads == []
    tracker.call("log", {}, 1)
    assert opened.wait(300)
    assert threads != [threading.current_thread()]
    tracker.finish()
    assert [call[0] for call in recorder.calls] == ["hyperparameters", "artifact", "log", "finish"]


@pytest.mark.parametrize("error", [OSError(28, "disk full"), SystemExit("log in first")])
def test_a_tracker_that_cannot_be_opened_is_reported_once_and_not_as_slow(warnings, error):
    def open_tracker():
        raise error

    tracker = BackgroundTracker("x", open_tracker)
    tracker.call("hyperparameters", {})
    tracker.call("log", {}, 0)
    tracker._thread.join(0.2)  # by now it has failed; if not, the test is only weaker
    log_steps(tracker, range(1, 3000))
    tracker.finish()
    (warning,) = warnings()
    assert f"tracker x: {type(error).__name__}: {error}" in warning


def test_a_tracker_that_raises_in_log_is_reported_once_and_not_called_again(warnings):
    recorder = Recorder(broken=3)
    tracker = BackgroundTracker("x", lambda: recorder)
    log_steps(tracker, range(10))
    tracker.finish()
    assert [call[2] for call in recorder.calls] == [0, 1, 2]
    (warning,) = warnings()
    assert "tracker x: ConnectionError: the service is gone" in warning


def test_an_artifact_that_cannot_be_stored_is_logged_and_the_tracker_continues(warnings):
    recorder = Recorder(broken="run-1-code")
    tracker = BackgroundTracker("x", lambda: recorder)
    tracker.call("log", {}, 0)
    tracker.call("artifact", "code", "run-1-code", "code")
    tracker.call("log", {}, 1)
    tracker.finish()
    assert recorder.calls == [("log", {}, 0), ("log", {}, 1), ("finish",)]
    assert len(warnings()) == 1


def test_a_full_queue_drops_calls_which_is_logged_once_and_counted_at_the_end(warnings, monkeypatch):
    monkeypatch.setattr(module, "_QUEUE_SIZE", 5)
    recorder = Recorder()
    tracker = blocked(recorder, queued=4)  # one place in the queue is free
    log_steps(tracker, range(5, 9))
    assert len(warnings()) == 1
    recorder.gate.set()
    assert all(recorder.logged.acquire(timeout=300) for _ in range(6))
    tracker.finish()
    assert "3 calls" in warnings()[1]
    assert recorder.calls == [*(("log", {}, step) for step in range(6)), ("finish",)]


def test_finish_closes_a_tracker_whose_queue_was_full(monkeypatch):
    monkeypatch.setattr(module, "_QUEUE_SIZE", 4)
    monkeypatch.setattr(module.BackgroundTracker, "finish_seconds", 3.0)
    recorder = Recorder()
    tracker = blocked(recorder, queued=4)
    ending = threading.Thread(target=tracker.finish)
    ending.start()
    ending.join(0.2)  # by now it waits for the queue; if not, the test is only weaker
    recorder.gate.set()
    ending.join(60)
    assert recorder.finished.wait(1), "the call to finish was dropped, so nothing was flushed"


def test_a_tracker_that_fails_while_its_queue_is_full_does_not_delay_the_end():
    recorder = Recorder(broken=0)
    tracker = blocked(recorder, queued=2000)
    recorder.gate.set()
    tracker.finish()
    assert not tracker._thread.is_alive()


def test_a_hanging_call_is_logged_once_and_no_queued_call_is_lost(warnings, monkeypatch):
    monkeypatch.setattr(module, "_HANGING_SECONDS", -1.0)  # every running call counts as hanging
    recorder = Recorder()
    tracker = blocked(recorder, queued=3)
    assert len(warnings()) == 1
    recorder.gate.set()
    tracker.finish()
    assert len(warnings()) == 1
    assert [call[0] for call in recorder.calls] == ["log"] * 4 + ["finish"]


def test_a_tracker_that_does_not_finish_is_abandoned_with_a_warning(warnings, monkeypatch):
    monkeypatch.setattr(module.BackgroundTracker, "finish_seconds", 0.05)
    recorder = Recorder()
    tracker = blocked(recorder)
    tracker.finish()
    assert len(warnings()) == 1
    recorder.gate.set()
    assert recorder.finished.wait(300)
