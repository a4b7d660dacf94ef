"""Settings of checkpointing, and what is kept."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmtrain.checkpoint.config import CheckpointerConfig, KeepInterval, Kind, decide, next_permanent_step


@pytest.mark.parametrize(
    "keep",
    [
        [{"every": 1}, {"every": 2, "until": 5}],
        [{"every": 1, "until": 5}, {"every": 2, "until": 5}],
        [{"every": True}],
    ],
)
def test_invalid_keep_entries_are_refused(keep):
    with pytest.raises(ValidationError, match="keep"):
        CheckpointerConfig(keep=keep)


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "checkpoints/a"),
        ({"base_path": "gs://bucket/x/"}, "gs://bucket/x/a"),
        ({"base_path": "all/${run_id}/steps"}, "all/a/steps"),
        ({"base_path": "one", "append_run_id_to_base_path": False}, "one"),
        ({"base_path": "~/x"}, "/home/me/x/a"),
    ],
)
def test_the_folder_of_a_run(settings, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert CheckpointerConfig(**settings).run_folder("a") == folder


@pytest.mark.parametrize("path", ["", "memory://x"])
def test_a_folder_that_does_not_last_is_refused(path):
    with pytest.raises(ValidationError, match="base_path"):
        CheckpointerConfig(base_path=path)


KEEP = [KeepInterval(every=10, until=50), KeepInterval(every=100, until=300), KeepInterval(every=1000)]


def test_the_first_entry_whose_until_is_not_past_decides():
    steps = [step for step in range(1, 3001) if decide(step, KEEP, last=False, asked=False)]
    assert steps == [10, 20, 30, 40, 50, 100, 200, 300, 1000, 2000, 3000]


@pytest.mark.parametrize(
    ("step", "last", "asked", "expected"),
    [
        (7, False, False, None),
        (7, False, True, Kind.TEMPORARY),
        (7, True, False, Kind.PERMANENT),
        (10, False, True, Kind.PERMANENT),
    ],
)
def test_the_kind_of_checkpoint_to_save(step, last, asked, expected):
    assert decide(step, KEEP, last=last, asked=asked) is expected


@st.composite
def keeps(draw) -> list[KeepInterval]:
    """Valid `keep` lists: `until` ascends, and only the last entry may have none."""
    ends = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
    entries = [KeepInterval(every=draw(st.integers(1, 40)), until=end) for end in ends]
    if draw(st.booleans()):
        entries.append(KeepInterval(every=draw(st.integers(1, 40))))
    return list(CheckpointerConfig(keep=entries).keep)


@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a machine with other work
@given(keeps(), st.integers(1, 120), st.data())
def test_the_next_permanent_step_is_the_first_one_after_a_step_or_the_last_of_the_run(keep, last, data):
    step = data.draw(st.integers(0, last - 1))
    kinds = ((later, decide(later, keep, last=later == last, asked=False)) for later in range(step + 1, last + 1))
    by_force = next(later for later, kind in kinds if kind)
    assert next_permanent_step(step, keep, last) == by_force
