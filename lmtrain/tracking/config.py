"""Settings of the trackers."""

from typing import Annotated, Any, Literal

from pydantic import Tag

from lmtrain.config.section import FreeText, RunPath, Section, by_type, changeable


class WandbConfig(Section):
    """Weights & Biases. Works offline when there is no key or no network.

    Settings after `save_xla_dumps` are further keywords of `wandb.init`, passed unchanged; null: W&B's default.
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
        True, description="Save the git repository of the main script with the run: commit, files and changes"
    )
    save_xla_dumps: bool = changeable(
        False, description="Upload the folder of XLA dumps to W&B; requires XLA_FLAGS=--xla_dump_to=FOLDER"
    )
    notes: FreeText | None = changeable(None, description="Notes: a longer description of the run")
    job_type: str | None = changeable(None, description="Job type of the run within its group")
    dir: str | None = changeable(None, description="Folder for W&B's own files; null: log_dir")
    config: dict[str, Any] | None = changeable(
        None, description="Further hyperparameters, in addition to the run's settings"
    )
    config_exclude_keys: list[str] | None = changeable(None, description="Hyperparameters of `config` to leave out")
    config_include_keys: list[str] | None = changeable(
        None, description="Hyperparameters of `config` to include; all others are left out"
    )
    allow_val_change: bool | None = changeable(
        None, description="Allow later starts to change hyperparameters in `config`"
    )
    force: bool | None = changeable(None, description="Require a W&B login; without one the tracker fails")
    reinit: bool | str | None = changeable(None, description="Behavior of wandb.init if the process already has a run")
    resume_from: str | None = changeable(None, description="Rewind a run and resume it from a step: RUN_ID?_step=N")
    fork_from: str | None = changeable(None, description="Fork a run at a step: RUN_ID?_step=N")
    tensorboard: bool | None = changeable(None, description="Old name of sync_tensorboard")
    sync_tensorboard: bool | None = changeable(None, description="Copy TensorBoard logs to W&B")
    monitor_gym: bool | None = changeable(None, description="Record videos of OpenAI Gym environments")
    anonymous: str | None = changeable(None, description="Deprecated by W&B, has no effect")
    settings: dict[str, Any] | None = changeable(None, description="Fields of wandb.Settings, by name")


class TensorboardConfig(Section):
    """TensorBoard event files, by tensorboardX."""

    type: Literal["tensorboard"] = changeable("tensorboard", description="Tracker type")
    logdir: RunPath = changeable(
        "tblogs", description="Folder for event files; each run writes to a subfolder named by its run id"
    )


class TrackioConfig(Section):
    """Trackio, which stores runs on this machine or in a Hugging Face Space. Requires the extra `trackio`."""

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
