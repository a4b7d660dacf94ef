"""Settings of the trackers."""

from typing import Annotated, Any, Literal

from pydantic import Tag

from lmtrain.config.section import RunPath, Section, by_type, changeable


class WandbConfig(Section):
    """Weights & Biases. Works offline when there is no key or no network.

    `init` has further keywords of `wandb.init`, passed unchanged; null: W&B's default.
    """

    type: Literal["wandb"] = changeable("wandb", description="Tracker type")
    entity: str | None = changeable(None, description="W&B entity (user or team); null: your default entity")
    project: str | None = changeable(None, description="W&B project; null: W&B's default project")
    name: str | None = changeable(None, description="Display name of the run; null: the run id")
    tags: list[str] = changeable([], description="Tags of the run")
    id: str | None = changeable(None, description="Run id; also the id of the lmtrain run if trainer.id is not set")
    group: str | None = changeable(None, description="W&B group the run belongs to")
    mode: Literal["online", "offline", "disabled"] | None = changeable(
        None, description="W&B mode; null: online if an API key is found, else offline"
    )
    resume: bool | Literal["allow", "never", "must", "auto"] | None = changeable(
        "allow", description="Resume mode for an existing run of this id: see wandb.init(resume=...)"
    )
    save_code: bool = changeable(
        True, description="Save the files that git tracks with the run, from the repository of the main script"
    )
    save_xla_dumps: bool = changeable(
        False, description="Upload the folder of XLA dumps to W&B; requires XLA_FLAGS=--xla_dump_to=FOLDER"
    )
    init: dict[str, Any] = changeable(
        {}, description="Further keywords of wandb.init, such as notes, job_type, resume_from and settings"
    )


class TensorboardConfig(Section):
    """TensorBoard event files, by tensorboardX."""

    type: Literal["tensorboard"] = changeable("tensorboard", description="Tracker type")
    logdir: RunPath = changeable(
        "tblogs", description="Folder for event files; each run writes to a subfolder named by its run id"
    )


class TrackioConfig(Section):
    """Trackio, which stores runs on this machine or in a Hugging Face Space. Requires the package trackio."""

    type: Literal["trackio"] = changeable("trackio", description="Tracker type")
    project: str = changeable("lmtrain", min_length=1, description="Trackio project name")
    name: str | None = changeable(None, description="Name of the run; null: the run id")
    group: str | None = changeable(None, description="Group of runs in the dashboard")
    space_id: str | None = changeable(None, description="Hugging Face Space to log to, user/name; null: this machine")
    dataset_id: str | None = changeable(None, description="Hugging Face dataset that stores the metrics of a Space")
    private: bool | None = changeable(None, description="Create the Space as private")
    resume: Literal["allow", "never", "must"] = changeable(
        "allow", description="Resume mode for an existing run of this name"
    )


class JsonConfig(Section):
    """Only the JSON lines that every run writes: <log_dir>/<run_id>.metrics.jsonl."""

    type: Literal["json"] = changeable("json", description="Tracker type")


class NoopConfig(Section):
    """No tracker in addition to the JSON lines."""

    type: Literal["noop"] = changeable("noop", description="Tracker type")


class CustomConfig(Section):
    """A custom tracker: a class with the methods of `lmtrain.tracking.tracker.Tracker`."""

    type: str = changeable(pattern=r"^[\w.]+[.:]\w+$", description="Class to import: package.module.Class")
    arguments: dict[str, Any] = changeable(
        {},
        description="Keyword arguments of the class, in addition to `run` (id), `folder` and `step` (finished updates)",
    )


TrackerConfig = Annotated[
    Annotated[WandbConfig, Tag("wandb")]
    | Annotated[TensorboardConfig, Tag("tensorboard")]
    | Annotated[TrackioConfig, Tag("trackio")]
    | Annotated[JsonConfig, Tag("json")]
    | Annotated[NoopConfig, Tag("noop")]
    | Annotated[CustomConfig, Tag("package.module.Class")],
    # a tracker without `type` is W&B
    by_type("wandb", other=("package.module.Class", r"^[\w.]+[.:]\w+$")),
]
