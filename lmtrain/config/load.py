"""CONFIG and overrides -> one validated object, or one report of all problems with file and line."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from lmtrain.config.errors import UserError
from lmtrain.config.kinds import without_foreign
from lmtrain.config.layers import Layer, Path, dotted
from lmtrain.config.other_systems import ADVICE
from lmtrain.config.overrides import apply_overrides
from lmtrain.config.suggest import known_paths, suggest_name
from lmtrain.config.yaml_loader import load_file, shipped_configs

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A validated config and the origin of each value."""

    config: ConfigT
    layer: Layer
    path: str

    @property
    def stem(self) -> str:
        """The file's name without folder and extension: `configs/gpt2_nano.yaml` -> `gpt2_nano`."""
        return os.path.splitext(os.path.basename(self.path.rstrip("/")))[0]


def load_config(model: type[ConfigT], config: str, overrides: Sequence[tuple[str, str]] = ()) -> Loaded[ConfigT]:
    """Find, load, merge and validate. Raises `UserError` with every problem found."""
    path = find_config(config)
    layer = apply_overrides(load_file(path), overrides, partial(without_foreign, model))
    try:
        return Loaded(model.model_validate(layer.data), layer, path)
    except ValidationError as error:
        problems = _describe_all(model, layer, error)
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
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


_EXPECTED = "Input should be "
_SHOWN_CHARACTERS = 60


def _describe_all(model: type[BaseModel], layer: Layer, error: ValidationError) -> list[str]:
    """One line for each invalid value, even where pydantic reports one problem for each type of a union."""
    by_path: dict[Path, list[Any]] = {}
    for problem in error.errors(include_url=False):
        path = _written_path(layer, problem["loc"], problem["type"] == "missing")
        by_path.setdefault(path, []).append(problem)
    return [
        _describe(model, layer, path, problems)
        for path, problems in by_path.items()
        if not _is_explained_below(path, problems, by_path)
    ]


def _is_explained_below(path: Path, problems: list[Any], by_path: Iterable[Path]) -> bool:
    """Whether problems inside a list or map explain it better than "not a number" from another union member does."""
    inside = any(other[: len(path)] == path and len(other) > len(path) for other in by_path)
    return inside and all(problem["type"].endswith("_type") for problem in problems)


def _describe(model: type[BaseModel], layer: Layer, path: Path, problems: list[Any]) -> str:
    """File and line, dotted path, what was expected, the value, and a suggestion if there is one."""
    kind, seen, context = problems[0]["type"], problems[0]["input"], problems[0].get("ctx", {})
    if kind == "unknown_type":
        return _describe_type(layer, path, seen, context)
    if kind == "field":  # from a validator of a section, which names the setting
        path = (*path, *context["field"].split("."))
    where = layer.origin_of(path)
    place = f"{where}: " if where else ""
    name = dotted(path)
    if kind == "extra_forbidden":
        if str(where) == f"--{name}":
            place = "--"
        if path[-1] in ADVICE:
            return f"{place}{name}: no such setting; {ADVICE[path[-1]]}"
        hint = suggest_name(name, known_paths(model, layer.data))
        if hint == name:  # written with its dots in a file
            return f"{place}{name}: no such setting; in a file, write {path[-1]!r} as nested, indented maps"
        return f"{place}{name}: no such setting" + (f"; did you mean {hint}?" if hint else "")
    if kind == "missing":
        return f"{place}{name}: this setting is required"
    message = problems[0]["msg"].removeprefix("Value error, ")
    if message.startswith(_EXPECTED):
        better = [p for p in problems if not p["type"].endswith("_type")] if isinstance(seen, list | dict) else []
        if better and not better[0]["msg"].startswith(_EXPECTED):
            message = better[0]["msg"]
        else:
            expected = [_plain(p["msg"]) for p in problems if p["msg"].startswith(_EXPECTED)]
            message = "expected " + " or ".join(dict.fromkeys(expected))
    if kind == "literal_error" and isinstance(seen, str):
        hint = suggest_name(seen, re.findall(r"'([^']*)'", message))
        message += f", not {_as_written(seen)}; did you mean {hint!r}?" if hint else f", not {_as_written(seen)}"
        return f"{place}{name}: {message}"
    if kind in ("model_type", "dict_type"):
        message = "expected a map of settings"
    shown = "" if isinstance(seen, dict | list | BaseModel) or message.endswith("?") else f", not {_as_written(seen)}"
    return f"{place}{name}: {message}{shown}" if name else f"{place}{message}"


# Pydantic's wording -> wording for YAML users.
_PLAIN = (
    (r"a valid boolean.*", "true or false"),
    (r"a valid integer.*", "a whole number"),
    (r"a valid number.*", "a number"),
    (r"a valid string.*", "text"),
    (r"a valid list", "a list"),
    (r"a valid dictionary( or instance of \w+)?", "a map of settings"),
)


def _plain(message: str) -> str:
    message = message.removeprefix(_EXPECTED)
    for pattern, words in _PLAIN:
        message = re.sub(f"^{pattern}$", words, message)
    return message


def _describe_type(layer: Layer, path: Path, seen: Any, context: dict[str, str]) -> str:
    """Report a section whose `type` is unknown, or that is not a map."""
    known = context["known"].split()
    if not isinstance(seen, dict):
        where = layer.origin_of(path)
        return f"{where}: {dotted(path)}: expected a map with type: {_or(known)}, not {_as_written(seen)}"
    path = (*path, "type")
    hint = suggest_name(str(seen["type"]), known)
    advice = f"did you mean {hint!r}?" if hint else f"expected {_or(known)}"
    return f"{layer.origin_of(path)}: {dotted(path)}: no such {context['what']} {_as_written(seen['type'])}; {advice}"


def _or(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _as_written(value: Any) -> str:
    """A scalar as written in YAML: `null` and `true`, not None and True."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _written_path(layer: Layer, loc: Path, is_missing: bool) -> Path:
    """Pydantic's location without parts that are not in the config: union members, the index of a one-item list."""
    path: list[str | int] = []
    data: Any = layer.data
    for index, part in enumerate(loc):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside:
            data = data[part]
            path.append(part)
        elif is_missing and index == len(loc) - 1:
            path.append(part)  # a missing setting has a name but no value
    return tuple(path)
