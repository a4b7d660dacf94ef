"""CONFIG and overrides -> one validated object, or one report of all problems with file and line."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from lmtrain.config.errors import UserError
from lmtrain.config.overrides import apply_overrides
from lmtrain.config.problems import describe_problems
from lmtrain.config.replaced import without_settings_of_other_types
from lmtrain.config.suggest import suggest_name
from lmtrain.config.tree import ConfigTree
from lmtrain.config.yaml_loader import load_file, shipped_configs

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """A validated config and the origin of each value."""

    config: ConfigT
    tree: ConfigTree = field(default_factory=ConfigTree)
    path: str = ""

    @property
    def stem(self) -> str:
        """The file's name without folder and extension: `configs/gpt2_nano.yaml` -> `gpt2_nano`."""
        path = self.path.partition("?")[0] if "://" in self.path else self.path
        return os.path.splitext(os.path.basename(path.rstrip("/")))[0]


def load_config(model: type[ConfigT], config: str, overrides: Sequence[tuple[str, str]] = ()) -> LoadedConfig[ConfigT]:
    """Find, load, merge and validate. Raises `UserError` with every problem found."""
    path = find_config(config)
    tree = apply_overrides(load_file(path), overrides, partial(without_settings_of_other_types, model))
    try:
        return LoadedConfig(model.model_validate(tree.data), tree, path)
    except ValidationError as error:
        number, problems = describe_problems(model, tree, error)
        count = f"{number:,} problems" if number > 1 else "a problem"
        place = " or on the command line" if overrides else ""
        report = "\n".join(f"  {line}" for line in problems)
        raise UserError(f"{path}: {count} in the config{place}\n{report}") from None


def find_config(config: str) -> str:
    """Path of a config, given as path or URL, as a path without `.yaml` or `.yml`, or as a shipped config's name."""
    if "://" in config:
        return config
    names = [config, config + ".yaml", config + ".yml"]
    if os.path.dirname(config) in ("config", "configs"):  # as in a checkout, but from any working directory
        names += [os.path.basename(name) for name in names]
    for folder in ("", shipped_configs()):
        for name in names:
            path = os.path.join(folder, name) if folder else name
            if os.path.isfile(path):
                return path
    shipped = sorted(name.removesuffix(".yaml") for name in os.listdir(shipped_configs()) if name.endswith(".yaml"))
    hint = suggest_name(os.path.basename(config).removesuffix(".yaml"), shipped)
    advice = f"did you mean {hint!r}?" if hint else "give a path, or one of: " + ", ".join(shipped)
    raise UserError(f"{config}: no such config; {advice}")
