"""Save policy: when to save, and which kind of checkpoint. Pure functions.

Steps count finished updates: `step-1000` is the state after 1000 updates.
"""

from collections.abc import Sequence
from enum import Enum

from lmtrain.checkpoint.config import KeepInterval


class Kind(Enum):
    """Permanent checkpoints are never deleted; a temporary one is deleted when a newer checkpoint is complete."""

    PERMANENT = "permanent"
    TEMPORARY = "temporary"


def next_permanent_step(step: int, keep: Sequence[KeepInterval], last: int) -> int:
    """The first step after `step` with a permanent checkpoint; the last step of a run has one.

    The first entry of `keep` whose `until` is not past decides.
    """
    for entry in keep:
        candidate = (step // entry.every + 1) * entry.every
        if entry.until is None or candidate <= entry.until:
            return min(candidate, last)
        step = max(step, entry.until)
    return last


def decide(step: int, keep: Sequence[KeepInterval], *, last: bool, asked: bool) -> Kind | None:
    """The kind of checkpoint to save after `step` updates, None for no save.

    `last`: the end of the run, which is always saved. `asked`: a save is due by the clock or a signal.
    """
    if last or next_permanent_step(step - 1, keep, step + 1) == step:
        return Kind.PERMANENT
    return Kind.TEMPORARY if asked else None
