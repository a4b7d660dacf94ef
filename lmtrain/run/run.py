"""A run: its config with the origin of each value, and its id."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from lmtrain.config.errors import UserError
from lmtrain.config.load import LoadedConfig
from lmtrain.config.tree import ConfigTree, Origin, lift, walk_leaves
from lmtrain.run.config import RunConfig
from lmtrain.runtime.run_path import fill_run_id


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
        first = error.errors()[0]
        # after `model` comes the kind, which is not part of the setting's name
        parts = [part for index, part in enumerate(first["loc"]) if (index, first["loc"][0]) != (1, "model")]
        if first["type"] == "field":  # from a validator of a section, which names the setting
            parts.append(first["ctx"]["field"])
        raise UserError(f"{source} gives {'.'.join(map(str, parts))}: {first['msg']}") from None


def _with(written: ConfigTree, derived: ResolvedSettings) -> ConfigTree:
    """The tree as written, plus the settings that differ from it, with their origin."""
    tree, before = written, dict(walk_leaves(written.data))
    for path, value in walk_leaves(derived.settings):
        if path not in before or before[path] != value:
            tree = tree.merge(lift(ConfigTree(value, {path: Origin(derived.source)}), path))
    return tree
