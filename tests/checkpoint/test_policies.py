"""When to save, as a table."""

from datetime import timedelta

import pytest

from lmtrain.checkpoint.config import KeepInterval
from lmtrain.checkpoint.policies import Kind, decide, is_permanent_step

KEEP = [KeepInterval(every=10, until=50), KeepInterval(every=100, until=300), KeepInterval(every=1000)]


def test_the_first_entry_not_yet_past_its_end_decides():
    kept = [step for step in range(1, 3001) if is_permanent_step(step, KEEP)]
    assert kept == [10, 20, 30, 40, 50, 100, 200, 300, 1000, 2000, 3000]


def test_after_the_last_end_nothing_is_permanent():
    assert [s for s in range(1, 100) if is_permanent_step(s, [KeepInterval(every=5, until=12)])] == [5, 10]


def test_without_entries_nothing_is_permanent():
    assert not any(is_permanent_step(step, []) for step in range(1, 100))


@pytest.mark.parametrize(
    ("step", "interval", "elapsed", "last", "expected"),
    [
        (7, None, 1e9, False, None),
        (7, 60, 59.9, False, None),
        (7, 60, 60.0, False, Kind.TEMPORARY),
        (10, 60, 0.0, False, Kind.PERMANENT),
        (10, 60, 999.0, False, Kind.PERMANENT),
        (10, None, 0.0, False, Kind.PERMANENT),
        (7, None, 0.0, True, Kind.PERMANENT),
        (7, 60, 999.0, True, Kind.PERMANENT),
    ],
)
def test_which_kind_to_save(step, interval, elapsed, last, expected):
    limit = None if interval is None else timedelta(seconds=interval)
    assert decide(step, KEEP, limit, elapsed, last) is expected
