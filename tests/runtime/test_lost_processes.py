"""Which process counts as lost, and the message about it."""

import time

import pytest

from lmtrain.runtime.logging import Processes
from lmtrain.runtime.lost_processes import ENDED, LostProcesses, describe, last_changes


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `time.monotonic` returns; waiting advances them."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_process_whose_key_is_seen_again_keeps_its_time_until_it_changes(clock):
    seen = last_changes(
        {0: ("", 0.0), 1: ("", 0.0), 2: ("", 0.0)}, [("lmtrain/alive/0", "1"), ("lmtrain/alive/1", "1")]
    )
    assert seen == {0: ("1", 0.0), 1: ("1", 0.0), 2: ("", 0.0)}
    clock[0] = 4
    assert last_changes(seen, [("lmtrain/alive/0", "2"), ("lmtrain/alive/1", "1")]) == seen | {0: ("2", 4)}
    assert last_changes(seen, [("lmtrain/alive/1", ENDED)]) == seen | {1: (ENDED, 4)}


def test_the_first_process_names_those_that_are_silent_and_have_not_ended(clock, monkeypatch):
    class Client:
        def key_value_set(self, key, value, allow_overwrite):
            self.published = value

        def key_value_dir_get(self, key):
            return [("lmtrain/alive/0", str(clock[0])), ("lmtrain/alive/1", ENDED), ("lmtrain/alive/2", "1")]

    def wait(seconds):
        time.sleep(seconds)
        return clock[0] >= 5

    lost, client = LostProcesses(10), Client()
    lost.processes = Processes(0, 3, "host:1")
    monkeypatch.setattr(lost._ends, "wait", wait)
    lost._count(client)
    assert (lost._silent, client.published) == ([2], "[2]")


@pytest.mark.parametrize(
    ("lost", "names"), [([1], "process 1 of 4"), ([1, 3], "processes 1, 3 of 4"), ([], "a process of 4")]
)
def test_the_message_names_the_lost_processes(lost, names):
    assert describe(lost, 4).startswith(f"lmtrain: error: lost {names}, which ended or does not respond; see its log. ")


def test_after_a_failure_without_a_lost_process_the_error_is_shown_after_the_timeout(clock):
    lost = LostProcesses(5)
    lost.end_if_lost()
    assert 5 <= clock[0] < 6


def test_a_process_without_connection_has_lost_the_first():
    class Client:
        def key_value_set(self, *arguments, **keywords):
            raise RuntimeError("UNAVAILABLE")

    lost = LostProcesses(5)
    lost.processes = Processes(1, 3, "host:1")
    lost._ends.set()
    lost._count(Client())
    assert lost._silent == [0]
