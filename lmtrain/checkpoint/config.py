"""Settings of checkpointing: where, how often, what to keep, what to begin from."""

from datetime import timedelta
from itertools import pairwise
from typing import Literal

from pydantic import Field, field_validator, model_validator

from lmtrain.config.base import Section
from lmtrain.config.durations import Duration
from lmtrain.config.errors import field_error
from lmtrain.runtime.run_path import fill_run_id, run_path


class KeepInterval(Section):
    """Permanent checkpoints every `every` steps, up to step `until`."""

    every: int = Field(ge=1, description="Save a permanent checkpoint every so many steps")
    until: int | None = Field(None, ge=1, description="Last step this entry is for; null: no end")


class CheckpointerConfig(Section):
    """Time-based checkpoints are temporary and replaced; step-based ones are permanent."""

    base_path: str = Field(
        "checkpoints/", min_length=1, description="Folder of checkpoints; the run id is appended, or put for ${run_id}"
    )
    append_run_id_to_base_path: bool = Field(True, description="Whether base_path is the folder of all runs or of one")
    save_interval: Duration | None = Field(
        timedelta(minutes=15), description="Time between temporary checkpoints, e.g. 15m; null: none"
    )
    keep: list[KeepInterval] = Field(
        [KeepInterval(every=10000)], description="Permanent checkpoints: entries of {every, until}, until ascending"
    )

    verify_on_restore: Literal["full", "sizes"] = Field(
        "full", description="What is verified before resuming from a checkpoint: every byte, or file sizes only"
    )
    on_save_error: Literal["continue", "stop"] = Field(
        "continue", description="When a checkpoint cannot be saved: train on and try again, or end the run"
    )
    staging_dir: str | None = Field(
        None,
        description="Local folder for checkpoints on their way to and from URLs other than gs://; several processes "
        "share it; null: the system's temporary folder",
    )

    def run_folder(self, run: str) -> str:
        """Where a run's checkpoints are."""
        return run_path(self.base_path, run) if self.append_run_id_to_base_path else fill_run_id(self.base_path, run)

    @field_validator("base_path")
    @classmethod
    def _lasting(cls, path: str) -> str:
        if path.startswith("memory://"):
            raise ValueError("what is in memory:// ends with the process; give a folder, or gs:// or s3://")
        return path.removeprefix("file://")

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


class InitializationConfig(Section):
    """What a run starts from. A run that has checkpoints of its own resumes from them."""

    load_checkpoint: bool | None = Field(
        None,
        description="Go on from the run's checkpoint: null: if there is one; true: there must be; "
        "false: there must be none",
    )
    load_checkpoint_path: str | None = Field(
        None, description="Where to look for it: a checkpoint, run folder or parent; null: the run's own folder"
    )
    initialize_from: str | None = Field(
        None, description="Begin with this checkpoint's whole state, after its step: a checkpoint, run folder or parent"
    )
    allow_partial_checkpoint: bool = Field(
        False, description="Give parameters that a checkpoint lacks fresh values instead of refusing it"
    )

    @model_validator(mode="after")
    def _load_or_not(self) -> "InitializationConfig":
        if self.load_checkpoint is False and self.load_checkpoint_path is not None:
            raise field_error("load_checkpoint_path", "set, while load_checkpoint is false; remove one of them")
        return self
