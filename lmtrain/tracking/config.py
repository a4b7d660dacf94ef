"""Settings of the trackers."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lmtrain.config.base import Section


class WandbConfig(Section):
    """Weights & Biases. Works offline when there is no key or no network."""

    type: Literal["wandb"] = Field("wandb", description="The kind of tracker")
    entity: str | None = Field(None, description="W&B entity; null: your default")
    project: str | None = Field(None, description="W&B project; null: W&B's default")
    name: str | None = Field(None, description="Display name; null: the run id")
    tags: list[str] = Field([], description="Tags of the run")
    id: str | None = Field(None, description="Run id; also the id of the lmtrain run if trainer.id is not set")
    group: str | None = Field(None, description="W&B group")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="null: online if a key is found, else offline"
    )


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


def _type_of(value: Any) -> str:
    """A tracker without `type` is W&B."""
    return str(value.get("type", "wandb") if isinstance(value, dict) else getattr(value, "type", value))


TrackerConfig = Annotated[
    Annotated[WandbConfig, Tag("wandb")]
    | Annotated[TensorboardConfig, Tag("tensorboard")]
    | Annotated[JsonConfig, Tag("json")]
    | Annotated[NoopConfig, Tag("noop")],
    Discriminator(
        _type_of,
        custom_error_type="tracker_type",
        custom_error_message="no such tracker; expected a map with type: wandb, tensorboard, json or noop",
    ),
]
