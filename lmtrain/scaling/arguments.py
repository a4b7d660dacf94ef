"""Settings as arguments of a command line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.yaml_loader import parse_value


def as_overrides(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of dotted name and value in YAML."""
    return [(name, _text(value)) for name, value in settings.items()]


def as_arguments(config: str, settings: Mapping[str, Any]) -> list[str]:
    """The arguments of a command: CONFIG and its overrides."""
    return [config, *(f"--{name}={text}" for name, text in as_overrides(settings))]


def as_command(arguments: Sequence[str]) -> str:
    """A line for a shell."""
    return shlex.join(["lmtrain", *arguments])


def _text(value: Any) -> str:
    """The value in YAML: a text that YAML reads as itself, else JSON, which is YAML."""
    if not isinstance(value, str) or value.startswith("include "):
        return json.dumps(value)
    try:
        return value if parse_value(value, "") == value else json.dumps(value)
    except UserError:
        return json.dumps(value)
