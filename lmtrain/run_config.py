"""What a run is made of: one section per room, and the id that names it.

This is the only place that knows all sections; each is defined in the `config.py` of the room that reads it.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from lmtrain.config.base import Section
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.models.config import ModelConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.optim.config import AdamConfig, OptimizerConfig
from lmtrain.tracking.config import WandbConfig
from lmtrain.train.config import TrainerConfig

# Where things are kept and how they are computed; changing these continues the same run.
_NOT_IDENTITY = {
    "data": {"cache_dir", "num_preprocess_workers"},
    "model": {"gradient_checkpointing", "scan_layers"},
    "optimizer": set[str](),
}

# File systems allow names of 255 bytes, and `<run id>.metrics.jsonl` is one.
_LONGEST_STEM = 100


class RunConfig(Section):
    """The settings of a run."""

    data: DataConfig = Field(default_factory=DataConfig, description="Text sources, tokenizer, token cache")
    model: ModelConfig = Field(default_factory=Gpt2Config, description="The model; type names its family")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Steps, batch, precision, mesh, logs")
    optimizer: OptimizerConfig = Field(default_factory=AdamConfig, description="The optimizer and its schedule")

    @model_validator(mode="after")
    def _schedule_fits(self) -> "RunConfig":
        steps = self.trainer.num_train_steps
        warmup, decay = self.optimizer.warmup, self.optimizer.decay
        lengths = [
            steps if part is None else part if isinstance(part, int) else int(part * steps) for part in (warmup, decay)
        ]
        if decay is not None and sum(lengths) > steps:
            raise ValueError(
                f"optimizer.warmup ({lengths[0]} steps) and optimizer.decay ({lengths[1]} steps) "
                f"are longer than trainer.num_train_steps ({steps})"
            )
        if decay is None and lengths[0] > steps:
            raise ValueError(f"optimizer.warmup ({lengths[0]} steps) is longer than trainer.num_train_steps ({steps})")
        return self


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes two runs the same run: data, model, optimizer, seed and batch size; not steps, cadence or mesh."""
    sections = {
        name: getattr(config, name).model_dump(mode="json", exclude=skip) for name, skip in _NOT_IDENTITY.items()
    }
    return sections | {"seed": config.trainer.seed, "train_batch_size": config.trainer.train_batch_size}


def run_id(config: RunConfig, stem: str, environment: Mapping[str, str] = os.environ) -> str:
    """`trainer.id`, else RUN_ID, else the W&B tracker's id, else `<config name>-<hash of the identity>`.

    Never random, so that the same command continues the same run.
    """
    wandb_ids = [t.id for t in config.trainer.tracker if isinstance(t, WandbConfig) and t.id]
    text = json.dumps(identity(config), sort_keys=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:_LONGEST_STEM] or "run"
    made = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    chosen = config.trainer.id or environment.get("RUN_ID") or next(iter(wandb_ids), None) or made
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", chosen):
        raise UserError(
            f"the run id {chosen!r} (trainer.id, RUN_ID or the W&B id) cannot name files and folders; "
            "use at most 200 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    return chosen
