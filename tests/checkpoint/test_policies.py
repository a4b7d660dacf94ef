"""Save policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.checkpoint.config import CheckpointerConfig, KeepInterval
from lmtrain.checkpoint.policies import Kind, decide, is_permanent_step, next_permanent_step

KEEP = [KeepInterval(every=10, until=50), KeepInterval(every=100, until=300), KeepInterval(every=1000)]


def test_the_first_entry_whose_until_is_not_past_decides():
    kept = [step for step in range(1, 3001) if is_permanent_step(step, KEEP)]
    assert kept == [10, 20, 30, 40, 50, 100, 200, 300, 1000, 2000, 3000]


def test_after_the_last_until_nothing_is_permanent():
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
def test_the_kind_of_checkpoint_to_save(step, last, asked, expected):
    assert decide(step, KEEP, last=last, asked=asked) is expected


def test_the_last_step_is_permanent_without_entries():
    assert decide(7, [], last=True, asked=False) is Kind.PERMANENT


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 10), (9, 10), (10, 20), (49, 50), (50, 100), (299, 300), (300, 1000), (999, 1000), (2999, 3000), (3000, 3500)],
)
def test_the_next_permanent_step(step, expected):
    assert next_permanent_step(step, KEEP, 3500) == expected


def test_without_entries_the_next_permanent_step_is_the_last_step():
    assert next_permanent_step(3, [], 700) == 700


@st.composite
def keeps(draw) -> list[KeepInterval]:
    """Valid `keep` lists: `until` ascends, and only the last entry may have none."""
    ends = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
    entries = [KeepInterval(every=draw(st.integers(1, 40)), until=end) for end in ends]
    if draw(st.booleans()):
        entries.append(KeepInterval(every=draw(st.integers(1, 40))))
    return list(CheckpointerConfig(keep=entries).keep)


@given(keeps(), st.integers(1, 120), st.data())
def test_the_next_permanent_step_is_the_first_one_after_a_step_or_the_last_of_the_run(keep, last, data):
    step = data.draw(st.integers(0, last - 1))
    by_force = next(later for later in range(step + 1, last + 1) if later == last or is_permanent_step(later, keep))
    assert next_permanent_step(step, keep, last) == by_force
