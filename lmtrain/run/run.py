"""A run: its config with the origin of each value, its id, and what identifies it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from lmtrain.config.describe import kind_of, sections_of
from lmtrain.config.load import LoadedConfig, first_problem
from lmtrain.config.section import Role, settings_of
from lmtrain.config.tree import ConfigTree, Origin, Path, dotted, lift, value_at, walk_leaves
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat
from lmtrain.run.config import RunConfig
from lmtrain.run.trainer import TrainerConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import find_masked, redact
from lmtrain.runtime.storage import fill_run_id
from lmtrain.tracking.config import WandbConfig


@dataclass(frozen=True)
class Run:
    """A run with its config as written, or as executed after `resolve`. `is_named`: it was selected by its id."""

    loaded: LoadedConfig[RunConfig]
    id: str
    is_named: bool = False

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def logs(self) -> str:
        """The run's log folder."""
        return os.path.join(fill_run_id(self.config.trainer.log_dir, self.id), self.id)

    @property
    def checkpoints(self) -> str:
        return self.config.trainer.checkpointer.run_folder(self.id)


class ResolvedSettings(NamedTuple):
    """Settings that a config leaves open and that come from the initial model or from the data.

    A `model` section is complete. `source` is their origin, as shown in errors and by `config show`.
    """

    source: str
    settings: Mapping[str, Mapping[str, Any]]


def resolve(run: Run, derived: ResolvedSettings | None) -> Run:
    """Apply `derived` to the config as written. No other function changes a config.

    Raises `UserError` if the result is invalid.
    """
    if derived is None:
        return run
    values = run.config.model_dump()
    for name, section in derived.settings.items():
        values[name] = section if name == "model" else values[name] | section
    loaded = run.loaded
    config = validate(values, derived.source)
    return replace(run, loaded=replace(loaded, config=config, tree=_with(loaded.tree, derived)))


def validate(values: Mapping[str, Any], source: str) -> RunConfig:
    """The config with these values. Raises `UserError` with their source."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        path, message, _ = first_problem(error)
        # after `model` comes the kind, which is not part of the setting's name
        name = dotted(path[:1] + path[2:] if path[:1] == ("model",) else path)
        raise UserError(f"{source} gives {name}: {message}") from None


def _with(written: ConfigTree, derived: ResolvedSettings) -> ConfigTree:
    """The tree as written, plus the settings that differ from it, with their origin."""
    tree, before = written, dict(walk_leaves(written.data))
    for path, value in walk_leaves(derived.settings):
        if path not in before or before[path] != value:
            tree = tree.merge(lift(ConfigTree(value, {path: Origin(derived.source)}), path))
    return tree


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


# Secrets of a config that was saved without them: from the environment, or from the config that the run was started
# with.

_TRACKERS = ("trainer", "tracker")
_TEXT = ("train_urls", "validation_urls")
# Settings that only training uses.
_OF_TRAINING = {
    *(_TRACKERS, ("trainer", "initialize_from"), ("trainer", "load_checkpoint_path")),
    *(("lora", "initialize_from"), ("hf_save_path",)),
}


def fill_masked(
    loaded: LoadedConfig[RunConfig], given: RunConfig | None = None, environment: Mapping[str, str] = os.environ
) -> LoadedConfig[RunConfig]:
    """The config with masked values replaced where their secrets are known; others stay masked.

    A setting of W&B is removed if its environment variable is set, such as WANDB_API_KEY, which W&B reads itself. Other
    secrets are those of the same settings in `given`.
    """
    masked = find_masked(loaded.tree.data)
    if not masked:
        return loaded
    data = deepcopy(loaded.tree.data)
    values = {} if given is None else given.model_dump(mode="json")
    forms = redact(values)
    for path in masked:
        form = value_at(forms, path)
        if form is not None and value_at(data, path) == form:
            value_at(data, path[:-1])[path[-1]] = value_at(values, path)
        elif _variable(path) in environment:
            del value_at(data, path[:-1])[path[-1]]
    return replace(loaded, config=RunConfig.model_validate(data), tree=replace(loaded.tree, data=data))


def require_secrets(loaded: LoadedConfig[RunConfig], trains: bool = False) -> None:
    """Raise `UserError` if values are masked that a command uses, which trains or does not.

    URLs of text are checked when text is read, as a finished cache does not need them.
    """
    masked = [
        path
        for path in find_masked(loaded.config.model_dump(mode="json"))
        if (trains or path[:2] not in _OF_TRAINING) and not (path[0] == "data" and set(_TEXT).intersection(path))
    ]
    if masked:
        lines = [f"  {dotted(path)}" + (f": set {name}" if (name := _variable(path)) else "") for path in masked]
        raise UserError(
            f"{loaded.path}: secrets are masked, since they are not saved with a run\n" + "\n".join(lines) + "\n  "
            "use the config that the run was started with (after --run ID, add it as CONFIG)"
        )


def _variable(path: Path) -> str:
    """The environment variable of a setting of W&B; empty for other settings."""
    is_setting = path[:2] == _TRACKERS and len(path) > 3 and path[-2] == "settings"
    return f"WANDB_{str(path[-1]).upper()}" if is_setting else ""
