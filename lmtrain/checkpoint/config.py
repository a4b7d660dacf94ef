"""Settings of checkpointing: where, how often, what to keep."""

from datetime import timedelta
from itertools import pairwise

from pydantic import Field, field_validator

from lmtrain.config.base import Section
from lmtrain.config.durations import Duration


class KeepInterval(Section):
    """Permanent checkpoints every `every` steps, up to step `until`."""

    every: int = Field(ge=1, description="Save a permanent checkpoint every so many steps")
    until: int | None = Field(None, ge=1, description="Last step this entry is for; null: no end")


class CheckpointerConfig(Section):
    """Time-based checkpoints are temporary and replaced; step-based ones are permanent."""

    base_path: str = Field(
        "checkpoints/", min_length=1, description="Folder of all runs' checkpoints; the run id is appended"
    )
    save_interval: Duration | None = Field(
        timedelta(minutes=15), description="Time between temporary checkpoints, e.g. 15m; null: none"
    )
    keep: list[KeepInterval] = Field(
        [KeepInterval(every=10000)], description="Permanent checkpoints: entries of {every, until}, until ascending"
    )

    @field_validator("keep")
    @classmethod
    def _ascending(cls, keep: list[KeepInterval]) -> list[KeepInterval]:
        ends = [entry.until for entry in keep]
        if None in ends[:-1]:
            raise ValueError("only the last entry may be without 'until'")
        bounded = [end for end in ends if end is not None]
        if any(later <= earlier for earlier, later in pairwise(bounded)):
            raise ValueError(f"'until' must grow from entry to entry, but is {bounded}")
        return keep
