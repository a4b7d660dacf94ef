"""Settings that a family and its `config.json` have under two names, read in both directions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel


class SameSetting(NamedTuple):
    """`ours` is `theirs` in `config.json`; `default` is the value of a file without it."""

    ours: str
    theirs: str
    default: Any


def to_hf(settings: Sequence[SameSetting], config: BaseModel) -> dict[str, Any]:
    """The values of `config.json`."""
    return {setting.theirs: getattr(config, setting.ours) for setting in settings}


def from_hf(settings: Sequence[SameSetting], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes."""
    return {setting.ours: values.get(setting.theirs, setting.default) for setting in settings}
