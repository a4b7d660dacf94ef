"""A run: its config with the origin of each value, and its id."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer, Origin, lift, merge, walk_leaves
from lmtrain.config.load import Loaded
from lmtrain.run.config import RunConfig
from lmtrain.runtime.run_path import fill_run_id


@dataclass(frozen=True)
class Run:
    """A run with its config as written, or as executed after `resolve`. `is_named`: it was selected by its id."""

    loaded: Loaded[RunConfig]
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


class Found(NamedTuple):
    """Settings that a config leaves open and that come from the initial model or from the data.

    A `model` section is complete. `source` is their origin, as shown in errors and by `config show`.
    """

    source: str
    settings: Mapping[str, Mapping[str, Any]]


def resolve(run: Run, found: Found | None) -> Run:
    """Apply `found` to the config as written. No other function changes a config.

    Raises `UserError` if the result is invalid.
    """
    if found is None:
        return run
    values = run.config.model_dump()
    for name, section in found.settings.items():
        values[name] = section if name == "model" else values[name] | section
    loaded = run.loaded
    return replace(run, loaded=replace(loaded, config=validate(values, found.source), layer=_with(loaded.layer, found)))


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


def _with(written: Layer, found: Found) -> Layer:
    """The layer as written, plus the found settings that differ from it, with their origin."""
    before = dict(walk_leaves(written.data))
    over = Layer()
    for path, value in walk_leaves(found.settings):
        if path not in before or before[path] != value:
            over = merge(over, lift(Layer(value, {path: Origin(found.source)}), path))
    return merge(written, over)
