"""Settings of checkpointing: where and how often to save, what to keep, what to initialize from; and the steps at which
that is due.
"""

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from typing import Literal

from pydantic import field_validator, model_validator

from lmtrain.config.section import Duration, RunPath, Section, changeable, tunable
from lmtrain.runtime.errors import field_error
from lmtrain.runtime.storage import fill_run_id, run_path


class KeepInterval(Section):
    """Permanent checkpoints every `every` steps, up to step `until`."""

    every: int = changeable(ge=1, description="Interval of permanent checkpoints, in steps")
    until: int | None = changeable(None, ge=1, description="Last step that this entry applies to; null: no end")


class BestConfig(Section):
    """What counts as an improvement of a run."""

    metric: str = changeable(
        "eval/loss", pattern="^eval/.", description="Evaluation metric, such as eval/loss or eval/ema/loss"
    )
    mode: Literal["min", "max"] = changeable("min", description="Whether lower (min) or higher (max) values are better")
    min_delta: float = changeable(0.0, ge=0, description="Minimum difference to the best value that is an improvement")


class CheckpointerConfig(Section):
    """Saving of checkpoints: time-based ones are temporary and replaced, step-based ones are permanent."""

    base_path: RunPath = changeable(
        "checkpoints/", min_length=1, description="Checkpoint folder; the run id is appended, or replaces ${run_id}"
    )
    append_run_id_to_base_path: bool = changeable(
        True, description="Append the run id to base_path; false: base_path is the folder of one run"
    )
    save_interval: Duration | None = changeable(
        timedelta(minutes=15), description="Time between temporary checkpoints, e.g. 15m; null: none"
    )
    keep: list[KeepInterval] = changeable(
        [KeepInterval(every=10000)], description="Permanent checkpoints: entries of {every, until}, until ascending"
    )

    keep_best: BestConfig | None = changeable(
        None, description="Keep the checkpoint with the best value of an evaluation metric; null: no"
    )
    verify_on_restore: Literal["full", "sizes"] = changeable(
        "full",
        description="Integrity check before resuming from a checkpoint: checksums of all files (full), or file sizes",
    )
    on_save_error: Literal["continue", "stop"] = changeable(
        "continue", description="Behavior when a checkpoint cannot be saved: continue training and retry, or stop"
    )
    staging_dir: str | None = changeable(
        None,
        description="Local folder to stage checkpoints at URLs other than gs://, before upload and after download; "
        "shared by all processes of a run; null: the system's temporary folder",
    )

    def run_folder(self, run: str) -> str:
        """The checkpoint folder of a run."""
        return run_path(self.base_path, run) if self.append_run_id_to_base_path else fill_run_id(self.base_path, run)

    @field_validator("base_path")
    @classmethod
    def _lasting(cls, path: str) -> str:
        if path.startswith("memory://"):
            raise ValueError("memory:// is lost when the process ends; set a folder, or a gs:// or s3:// URL")
        return path.removeprefix("file://")

    @field_validator("keep")
    @classmethod
    def _ascending(cls, keep: list[KeepInterval]) -> list[KeepInterval]:
        ends = [entry.until for entry in keep]
        if None in ends[:-1]:
            raise ValueError("only the last entry may be without 'until'")
        bounded = [end for end in ends if end is not None]
        if any(later <= earlier for earlier, later in pairwise(bounded)):
            raise ValueError(f"'until' must increase from entry to entry, got {bounded}")
        return keep


class InitializationConfig(Section):
    """Initial state of a run. A run that already has checkpoints resumes from them."""

    load_checkpoint: bool | None = changeable(
        None,
        description="Resume from the run's checkpoint; null: if one exists; true: required; "
        "false: an error if one exists",
    )
    load_checkpoint_path: str | None = changeable(
        None, description="Path to resume from: a checkpoint, run folder or parent folder; null: the run's own folder"
    )
    initialize_from: str | None = tunable(
        None,
        description="Checkpoint to start from, with its full state and step: path of a checkpoint, run folder or "
        "parent folder",
    )
    allow_partial_checkpoint: bool = changeable(
        False, description="Randomly initialize parameters missing from a checkpoint; false: an error"
    )

    @model_validator(mode="after")
    def _load_or_not(self) -> "InitializationConfig":
        if self.load_checkpoint is False and self.load_checkpoint_path is not None:
            raise field_error("load_checkpoint_path", "conflicts with load_checkpoint: false; remove one of them")
        return self


# Save policy: when to save, and which kind of checkpoint. Pure functions.
#
# Steps count finished updates: `step-1000` is the state after 1000 updates.


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
