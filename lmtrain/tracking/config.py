"""Settings of the trackers."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from lmtrain.config.base import Section, by_type


class WandbConfig(Section):
    """Weights & Biases. Works offline when there is no key or no network.

    Below `save_xla_dumps` are further keywords of `wandb.init`, given to it as they are; null: as W&B has it.
    """

    type: Literal["wandb"] = Field("wandb", description="The kind of tracker")
    entity: str | None = Field(None, description="W&B entity; null: your default")
    project: str | None = Field(None, description="W&B project; null: W&B's default")
    name: str | None = Field(None, description="Display name; null: the run id")
    tags: list[str] = Field([], description="Tags of the run")
    id: str | None = Field(None, description="Run id; also the id of the lmtrain run if trainer.id is not set")
    group: str | None = Field(None, description="W&B group the run belongs to")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="null: online if a key is found, else offline"
    )
    resume: bool | Literal["allow", "never", "must", "auto"] | None = Field(
        "allow", description="What W&B does if it has a run of this id: as wandb.init(resume=...)"
    )
    save_code: bool = Field(
        True, description="Keep the git repository of the main script with the run: its commit, files and changes"
    )
    save_xla_dumps: bool = Field(
        False, description="Keep what XLA writes with the run; needs XLA_FLAGS=--xla_dump_to=FOLDER"
    )
    notes: str | None = Field(None, description="A longer description of the run")
    job_type: str | None = Field(None, description="What kind of job the run is, within its group")
    dir: str | None = Field(None, description="Folder of W&B's own files; null: log_dir")
    config: dict[str, Any] | None = Field(None, description="Further hyperparameters, beside the run's settings")
    config_exclude_keys: list[str] | None = Field(None, description="Hyperparameters of `config` to leave out")
    config_include_keys: list[str] | None = Field(None, description="Hyperparameters of `config` to take, no others")
    allow_val_change: bool | None = Field(None, description="Let later starts change hyperparameters in `config`")
    force: bool | None = Field(None, description="Do not train without being logged in to W&B")
    reinit: bool | str | None = Field(None, description="What wandb.init does if the process has a run already")
    resume_from: str | None = Field(None, description="RUN_ID?_step=N: go on from a step of a run")
    fork_from: str | None = Field(None, description="RUN_ID?_step=N: branch off at a step of a run")
    tensorboard: bool | None = Field(None, description="Older name of sync_tensorboard")
    sync_tensorboard: bool | None = Field(None, description="Let W&B copy what is written for TensorBoard")
    monitor_gym: bool | None = Field(None, description="Let W&B record videos of OpenAI Gym")
    anonymous: str | None = Field(None, description="Deprecated by W&B, without effect there")
    settings: dict[str, Any] | None = Field(None, description="Fields of wandb.Settings, by name")


class TensorboardConfig(Section):
    """TensorBoard event files, by tensorboardX."""

    type: Literal["tensorboard"] = Field("tensorboard", description="The kind of tracker")
    logdir: str = Field("tblogs", description="Folder of all runs' event files; the run id is appended")


class TrackioConfig(Section):
    """Trackio, which keeps its runs on this machine or in a Hugging Face Space. Needs the extra `trackio`."""

    type: Literal["trackio"] = Field("trackio", description="The kind of tracker")
    project: str = Field("lmtrain", min_length=1, description="Trackio project")
    name: str | None = Field(None, description="Name of the run; null: the run id")
    group: str | None = Field(None, description="Group of runs in the dashboard")
    space_id: str | None = Field(None, description="Hugging Face Space to log to, as user/name; null: this machine")
    dataset_id: str | None = Field(None, description="Hugging Face dataset that keeps the metrics of a Space")
    private: bool | None = Field(None, description="Whether a Space that is made is private")
    resume: Literal["allow", "never", "must"] = Field(
        "allow", description="What Trackio does if it has a run of this name"
    )


class JsonConfig(Section):
    """Only the JSON lines that every run writes anyway: <log_dir>/<run_id>.metrics.jsonl."""

    type: Literal["json"] = Field("json", description="The kind of tracker")


class NoopConfig(Section):
    """No tracker beside the JSON lines."""

    type: Literal["noop"] = Field("noop", description="The kind of tracker")


class CustomConfig(Section):
    """A tracker of your own: a class with the five methods of `lmtrain.tracking.tracker.Tracker`."""

    type: str = Field(pattern=r"^[\w.]+[.:]\w+$", description="Where to import the class from: package.module.Class")
    arguments: dict[str, Any] = Field(
        {}, description="Keyword arguments of the class, beside `run` (its id), `folder` and `step` (updates so far)"
    )


_KINDS = ("wandb", "tensorboard", "trackio", "json", "noop")

TrackerConfig = Annotated[
    Annotated[WandbConfig, Tag("wandb")]
    | Annotated[TensorboardConfig, Tag("tensorboard")]
    | Annotated[TrackioConfig, Tag("trackio")]
    | Annotated[JsonConfig, Tag("json")]
    | Annotated[NoopConfig, Tag("noop")]
    | Annotated[CustomConfig, Tag("custom")],
    # a tracker without `type` is W&B
    by_type("tracker", "wandb", [*_KINDS, "package.module.Class"], other=("custom", r"^[\w.]+[.:]\w+$")),
]
