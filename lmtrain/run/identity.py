"""Identity of a run, which decides whether two starts are the same run, and the run id."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from lmtrain.config.describe import kind_of, sections_of
from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact
from lmtrain.config.setting import Role, settings_of
from lmtrain.config.tree import Path
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat
from lmtrain.run.config import RunConfig
from lmtrain.run.trainer import TrainerConfig
from lmtrain.tracking.config import WandbConfig

# Roles of settings that a run id depends on.
_IDENTITY = (Role.ARCHITECTURE, Role.IDENTITY, Role.TUNABLE)

# File names, such as `<run_id>.metrics.jsonl`, have at most 255 bytes.
_MAX_STEM = 100


def identity(config: RunConfig) -> dict[str, Any]:
    """Identity of a run: the settings whose role says so, of data, model, optimizer, seed and batch size.

    Sections contain only values that differ from the defaults, so that settings added by later versions do not change
    it, and no secrets, so that a renewed signature of a URL does not.
    """
    sections = {}
    for name in ("data", "model", "optimizer"):
        section = getattr(config, name)
        kind = {"type": section.type} if hasattr(section, "type") else {}
        sections[name] = kind | _settings(section, exclude_defaults=True)
    _describe_data(sections["data"], config.data)
    objective = _settings(config.objective, exclude_defaults=True)
    if config.objective.type != "cross_entropy":
        objective["type"] = config.objective.type
    minimized: dict[str, Any] = {"objective": objective} if objective else {}
    if config.lora is not None:
        minimized["lora"] = _settings(config.lora)
    if config.transfer is not None:
        minimized["transfer"] = _settings(config.transfer)
    others = _settings(config) | _settings(config.trainer)
    return redact(sections | minimized | {name: value for name, value in others.items() if not _is_unset(value)})


def _settings(section: BaseModel, exclude_defaults: bool = False) -> dict[str, Any]:
    names = settings_of(type(section), *_IDENTITY)
    return section.model_dump(mode="json", include=names, exclude_defaults=exclude_defaults)


def _is_unset(value: Any) -> bool:
    """Whether a setting has no value; 0 is one."""
    return value is None or value is False or value == ""


def _describe_data(described: dict[str, Any], data: DataConfig) -> None:
    """Complete the settings that differ from the defaults: with the kinds of formats, which are defaults of their own.

    `reset_positions: false` was the default before there were formats.
    """
    of_sources = described.get("configs", {})
    for name, source in (data.configs or {}).items():
        if not isinstance(source.format, TextFormat):
            of_sources[name]["format"]["type"] = source.format.type
    if not isinstance(data.format, TextFormat):
        described["format"]["type"] = data.format.type
    if data.reset_positions is False and not any(source.has_targets for source in data.sources().values()):
        described.pop("reset_positions", None)


def run_identity(config: RunConfig, tokenizer: Mapping[str, Any], data_tokens: str) -> dict[str, Any]:
    """The identity of a run as saved with its checkpoints: of the optimizer, whose settings may change, the type."""
    other = {"optimizer": {"type": config.optimizer.type}, "tokenizer": dict(tokenizer), "data_tokens": data_tokens}
    return identity(config) | other


def omitted(run_identity: Mapping[str, Any], path: Path) -> str:
    """The text of a value that `run_identity` omits: the default of the setting, or `nothing` for what is none."""
    section: type[BaseModel] = RunConfig if path[0] in RunConfig.model_fields else TrainerConfig
    given: Any = run_identity
    for part in path[:-1]:
        field = section.model_fields.get(str(part))
        kinds = {kind_of(kind): kind for kind in sections_of(field.annotation)} if field is not None else {}
        given = given.get(part) if isinstance(given, Mapping) else None
        if not kinds or (given is None and field is not None and field.get_default(call_default_factory=True) is None):
            return "nothing"
        kind = given.get("type") if isinstance(given, Mapping) else None
        section = kinds.get(kind) or next(iter(kinds.values()))
    field = section.model_fields.get(str(path[-1]))
    if field is None or field.is_required():
        return "nothing"
    return f"{field.get_default(call_default_factory=True)!r} (the default)"


def without_tunable(run_identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a saved identity that a run may never change: without settings of its initial state."""
    tunable = settings_of(RunConfig, Role.TUNABLE) | settings_of(TrainerConfig, Role.TUNABLE)
    return {name: value for name, value in run_identity.items() if name not in tunable}


def run_id(config: RunConfig, stem: str, environment: Mapping[str, str] = os.environ) -> str:
    """`trainer.id`, else RUN_ID, else the W&B tracker's id, else `<config name>-<hash of the identity>`.

    Never random, so that the same command resumes the same run.
    """
    if not config.trainer.id and "RUN_ID" in environment and not environment["RUN_ID"].strip():
        raise UserError("RUN_ID: the environment variable is empty; set it to a run id, or unset it")
    wandb_ids = [t.id for t in config.trainer.tracker if isinstance(t, WandbConfig) and t.id]
    text = json.dumps(identity(config), sort_keys=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:_MAX_STEM] or "run"
    made = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    chosen = config.trainer.id or environment.get("RUN_ID") or next(iter(wandb_ids), None) or made
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", chosen):
        raise UserError(
            f"invalid run id {chosen!r} (trainer.id, RUN_ID or the W&B id): it names files and folders; "
            "use at most 200 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return chosen
