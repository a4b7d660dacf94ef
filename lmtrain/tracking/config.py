"""Settings of the trackers."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from lmtrain.config.base import Section, by_type, planned


class WandbConfig(Section):
    """Weights & Biases. Works offline when there is no key or no network."""

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
    save_code: bool = planned(True, description="Keep the git repository of the main script with the run")
    save_xla_dumps: bool = planned(False, description="Keep what XLA_FLAGS --xla_dump_to writes with the run")


class TensorboardConfig(Section):
    """TensorBoard event files, by tensorboardX."""

    type: Literal["tensorboard"] = Field("tensorboard", description="The kind of tracker")
    logdir: str = Field("tblogs", description="Folder of all runs' event files; the run id is appended")


class JsonConfig(Section):
    """Only the JSON lines that every run writes anyway: <log_dir>/<run_id>.metrics.jsonl."""

    type: Literal["json"] = Field("json", description="The kind of tracker")


class NoopConfig(Section):
    """No tracker beside the JSON lines."""

    type: Literal["noop"] = Field("noop", description="The kind of tracker")


TrackerConfig = Annotated[
    Annotated[WandbConfig, Tag("wandb")]
    | Annotated[TensorboardConfig, Tag("tensorboard")]
    | Annotated[JsonConfig, Tag("json")]
    | Annotated[NoopConfig, Tag("noop")],
    by_type("tracker", "wandb", ["wandb", "tensorboard", "json", "noop"]),  # a tracker without `type` is W&B
]
