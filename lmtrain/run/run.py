"""A run: its config, with where each value is from, and its id."""

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
    """What was written, or after `resolve` what is run. `is_named` says that the run was asked for by its id."""

    loaded: Loaded[RunConfig]
    id: str
    is_named: bool = False

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def logs(self) -> str:
        """The run's own folder among the logs."""
        return os.path.join(fill_run_id(self.config.trainer.log_dir, self.id), self.id)

    @property
    def checkpoints(self) -> str:
        return self.config.trainer.checkpointer.run_folder(self.id)


class Found(NamedTuple):
    """Settings of sections that a config leaves to something else: to the model that it begins from, or to its data.

    A `model` is whole. `source` is where they are from, as an error and `config show` say it.
    """

    source: str
    settings: Mapping[str, Mapping[str, Any]]


def resolve(run: Run, found: Found | None) -> Run:
    """From what was written to what is run. Nothing else makes a config into another one.

    Raises `UserError` if the two do not fit together.
    """
    if found is None:
        return run
    values = run.config.model_dump()
    for name, section in found.settings.items():
        values[name] = section if name == "model" else values[name] | section
    loaded = run.loaded
    return replace(run, loaded=replace(loaded, config=validate(values, found.source), layer=_with(loaded.layer, found)))


def validate(values: Mapping[str, Any], source: str) -> RunConfig:
    """The config of these values. Raises `UserError` that names their source."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        # after `model` comes the kind, which is no part of the setting's name
        parts = [part for index, part in enumerate(first["loc"]) if (index, first["loc"][0]) != (1, "model")]
        if first["type"] == "field":  # a check of a whole section, which says what setting it is about
            parts.append(first["ctx"]["field"])
        raise UserError(f"{source} gives {'.'.join(map(str, parts))}: {first['msg']}") from None


def _with(written: Layer, found: Found) -> Layer:
    """The settings and their places with those that were found and are not what was written."""
    before = dict(walk_leaves(written.data))
    over = Layer()
    for path, value in walk_leaves(found.settings):
        if path not in before or before[path] != value:
            over = merge(over, lift(Layer(value, {path: Origin(found.source)}), path))
    return merge(written, over)
