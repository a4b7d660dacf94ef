"""A stop request is noticed at a check: at every call of a single process, rarely by several, together."""

import pytest

from lmtrain.runtime import distributed
from lmtrain.runtime.distributed import StopCheck
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.runtime.signals import StoppedError, StopRequest


def test_a_single_process_checks_for_a_stop_at_every_call():
    stop = StopRequest()
    check = StopCheck(ALONE, stop)
    check()
    stop.requested = True
    with pytest.raises(StoppedError):
        check()


def test_several_processes_check_rarely_and_stop_at_the_same_call(monkeypatch):
    """The other process receives a signal after call 20."""
    calls = []

    def asked(processes, name, mine):
        calls.append(mine)
        return [mine, len(calls) > 1]

    monkeypatch.setattr(distributed, "gather", asked)
    check = StopCheck(Processes(0, 2), StopRequest())
    for _ in range(31):
        check()
    assert calls == [False]
    with pytest.raises(StoppedError):
        check()
