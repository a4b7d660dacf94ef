"""When to save, as a table."""

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
    ("step", "last", "asked", "expected"),
    [
        (7, False, False, None),
        (7, False, True, Kind.TEMPORARY),
        (7, True, False, Kind.PERMANENT),
        (7, True, True, Kind.PERMANENT),
        (10, False, False, Kind.PERMANENT),
        (10, False, True, Kind.PERMANENT),
        (10, True, False, Kind.PERMANENT),
    ],
)
def test_which_kind_to_save(step, last, asked, expected):
    assert decide(step, KEEP, last=last, asked=asked) is expected


def test_the_end_of_a_run_is_kept_even_if_nothing_else_is():
    assert decide(7, [], last=True, asked=False) is Kind.PERMANENT
