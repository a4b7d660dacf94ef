"""When to save, and which kind of checkpoint: small pure questions.

Steps count finished updates: `step-1000` is the state after 1000 updates.
"""

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum

from lmtrain.checkpoint.config import KeepInterval


class Kind(Enum):
    """Permanent checkpoints are never deleted; a temporary one goes when a newer checkpoint is complete."""

    PERMANENT = "permanent"
    TEMPORARY = "temporary"


def is_permanent_step(step: int, keep: Sequence[KeepInterval]) -> bool:
    """Whether `keep` asks for a permanent checkpoint at `step`: the first entry not yet past its `until` decides."""
    for entry in keep:
        if entry.until is None or step <= entry.until:
            return step % entry.every == 0
    return False


def decide(
    step: int, keep: Sequence[KeepInterval], interval: timedelta | None, since_last_save: float, last: bool
) -> Kind | None:
    """The kind of checkpoint to save after `step` updates, None for no save.

    `since_last_save` is in seconds and counts from the last save of either kind, or from the start; `last` is the end
    of the run, which is always saved.
    """
    if last or is_permanent_step(step, keep):
        return Kind.PERMANENT
    if interval is not None and since_last_save >= interval.total_seconds():
        return Kind.TEMPORARY
    return None
