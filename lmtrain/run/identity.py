"""Identity of a run, which decides whether two starts are the same run, and the run id."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact
from lmtrain.data.config import DataConfig
from lmtrain.run.config import RunConfig
from lmtrain.tracking.config import WandbConfig

# Settings of storage and of execution: with other values the same run resumes.
_NOT_IDENTITY = {
    "data": {"cache_dir", "num_preprocess_workers", "mirror_dir", "max_mirror_bytes", "max_document_bytes"},
    "model": {"gradient_checkpointing", "scan_layers", "attn_backend", "flash_attention_block_size"},
    "optimizer": set[str](),
}

# File names, such as `<run_id>.metrics.jsonl`, have at most 255 bytes.
_LONGEST_STEM = 100


def identity(config: RunConfig) -> dict[str, Any]:
    """Identity of a run: data, model, optimizer, seed and batch size; not steps, intervals or mesh.

    Contains only values that differ from the defaults, so that settings added by later versions do not change it.
    """
    sections = {}
    for name, skip in _NOT_IDENTITY.items():
        section = getattr(config, name)
        kind = {"type": section.type} if hasattr(section, "type") else {}
        sections[name] = kind | redact(section.model_dump(mode="json", exclude=skip, exclude_defaults=True))
    _describe_data(sections["data"], config.data)
    objective = config.objective.model_dump(mode="json", exclude_defaults=True)
    if config.objective.type != "cross_entropy":
        objective["type"] = config.objective.type
    minimized: dict[str, Any] = {"objective": objective} if objective else {}
    if config.lora is not None:
        minimized["lora"] = config.lora.model_dump(mode="json")
    order = {} if config.data_seed is None else {"data_seed": config.data_seed}
    sources = {
        "initialize_from_hf": config.initialize_from_hf,
        "initialize_from_checkpoint_path": config.initialize_from_checkpoint_path,
        "initialize_from": config.trainer.initialize_from,
    }
    initial = {name: value for name, value in sources.items() if value}
    sizes = config.trainer.model_dump(mode="json", include={"seed", "train_batch_size"})
    return sections | minimized | order | initial | sizes


def _describe_data(described: dict[str, Any], data: DataConfig) -> None:
    """Complete the settings that differ from the defaults: with the kinds of formats, which are defaults of their own.

    `reset_positions: false` was the default before there were formats.
    """
    of_sources = described.get("configs", {})
    for name, source in (data.configs or {}).items():
        if source.has_targets:
            of_sources[name]["format"]["type"] = source.format.type
    if data.has_targets:
        described["format"]["type"] = data.format.type
    if data.reset_positions is False and not any(source.has_targets for source in data.sources().values()):
        described.pop("reset_positions", None)


def run_identity(config: RunConfig, tokenizer: Mapping[str, Any], data_tokens: str) -> dict[str, Any]:
    """What must stay the same between two starts of a run.

    The state can be resumed with other learning rates and decays, but not with another optimizer.
    """
    other = {"optimizer": {"type": config.optimizer.type}, "tokenizer": dict(tokenizer), "data_tokens": data_tokens}
    return identity(config) | other


def run_id(config: RunConfig, stem: str, environment: Mapping[str, str] = os.environ) -> str:
    """`trainer.id`, else RUN_ID, else the W&B tracker's id, else `<config name>-<hash of the identity>`.

    Never random, so that the same command resumes the same run.
    """
    wandb_ids = [t.id for t in config.trainer.tracker if isinstance(t, WandbConfig) and t.id]
    text = json.dumps(identity(config), sort_keys=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:_LONGEST_STEM] or "run"
    made = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    chosen = config.trainer.id or environment.get("RUN_ID") or next(iter(wandb_ids), None) or made
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", chosen):
        raise UserError(
            f"invalid run id {chosen!r} (trainer.id, RUN_ID or the W&B id): it names files and folders; "
            "use at most 200 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return chosen
