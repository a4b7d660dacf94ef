"""Pydantic's errors as lines for the user: file and line, the setting, what was expected, and a suggestion."""

import json
import re
from copy import deepcopy
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError

from lmtrain.config.other_systems import ADVICE
from lmtrain.config.redact import redact
from lmtrain.config.spellings import OTHER_NAMES
from lmtrain.config.suggest import known_paths, suggest_name
from lmtrain.config.tree import ConfigTree, Path, dotted

_EXPECTED = "Input should be "
_SHOWN_CHARACTERS = 60
_SHOWN_PROBLEMS = 20


def describe_problems(model: type[BaseModel], tree: ConfigTree, error: ValidationError) -> tuple[int, list[str]]:
    """The number of invalid values, and a line for each of the first ones.

    It is one line even where pydantic reports one problem for each type of a union.
    """
    by_path: dict[Path, list[Any]] = {}
    for problem in error.errors(include_url=False):
        path = _written_path(tree, problem["loc"], problem["type"] == "missing")
        by_path.setdefault(path, []).append(problem)
    # problems inside a list or map explain it better than "not a number" from another member of the union does
    outer = {path[:end] for path in by_path for end in range(len(path))}
    places = [
        path
        for path, problems in by_path.items()
        if path not in outer or not all(problem["type"].endswith("_type") for problem in problems)
    ]
    lines = [_describe(model, tree, path, by_path[path]) for path in places[:_SHOWN_PROBLEMS]]
    rest = len(places) - len(lines)
    return len(places), [*lines, *([f"and {rest:,} more"] if rest else [])]


def _describe(model: type[BaseModel], tree: ConfigTree, path: Path, problems: list[Any]) -> str:
    """File and line, dotted path, what was expected, the value, and a suggestion if there is one."""
    kind, seen, context = problems[0]["type"], problems[0]["input"], problems[0].get("ctx", {})
    if kind == "union_tag_invalid":
        return _describe_type(tree, path, seen, context)
    if kind == "field":  # from a validator of a section, which names the setting
        path = (*path, *context["field"].split("."))
    where = tree.origin_of(path)
    place = f"{where}: " if where else ""
    name = dotted(path)
    if kind == "extra_forbidden":
        if str(where) == f"--{name}":
            place = "--"
        if path[-1] in ADVICE:
            return f"{place}{name}: no such setting; {ADVICE[path[-1]]}"
        if (of_kind := _kind_without(model, tree, path)) is not None:
            return f"{place}{name}: no such setting {of_kind}"
        others = {other: right for other, right in OTHER_NAMES.items() if other.partition(".")[0] in model.model_fields}
        hint = suggest_name(name, [*known_paths(model, tree.data), *others])
        hint = others.get(hint or "", hint)
        if hint == name:  # written with its dots in a file
            return f"{place}{name}: no such setting; in a file, write {path[-1]!r} as nested, indented maps"
        return f"{place}{name}: no such setting" + (f"; did you mean {hint}?" if hint else "")
    if kind == "missing":
        return f"{place}{name}: this setting is required"
    message = problems[0]["msg"].removeprefix("Value error, ")
    if kind == "int_parsing_size":
        message = "expected a whole number below 9e18"
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
    is_said = isinstance(seen, dict | list | BaseModel) or kind in ("bool_as_number", "text") or message.endswith("?")
    shown = "" if is_said else f", not {_as_written(seen)}"
    return f"{place}{name}: {message}{shown}" if name else f"{place}{message}"


def _kind_without(model: type[BaseModel], tree: ConfigTree, path: Path) -> str | None:
    """Words for the `type` of a section that lacks a setting which sections of another type have; None for others."""
    data = deepcopy(tree.data)
    section: Any = data
    for part in path[:-1]:
        section = section[part]
    kind = section.pop("type", None)
    if "." in str(path[-1]) or dotted(path) not in known_paths(model, data):
        return None
    return f"of type {_as_written(kind)}" if kind is not None else f"of the default type; set {dotted(path[:-1])}.type"


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


def _describe_type(tree: ConfigTree, path: Path, seen: Any, context: dict[str, str]) -> str:
    """Report a section whose `type` is unknown, or that is not a map."""
    known = re.findall(r"'([^']*)'", context["expected_tags"])
    if not isinstance(seen, dict):
        where = tree.origin_of(path)
        return f"{where}: {dotted(path)}: expected a map with type: {_or(known)}, not {_as_written(seen)}"
    what = next(part for part in reversed(path) if isinstance(part, str))
    path = (*path, "type")
    hint = suggest_name(str(seen["type"]), known)
    advice = f"did you mean {hint!r}?" if hint else f"expected {_or(known)}"
    return f"{tree.origin_of(path)}: {dotted(path)}: no such {what} {_as_written(seen['type'])}; {advice}"


def _or(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _as_written(value: Any) -> str:
    """A scalar as written in YAML: `null`, `true` and 2024-01-01, not None, True and datetime.date(2024, 1, 1)."""
    if isinstance(value, date):
        return str(value)
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(redact(value))
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _written_path(tree: ConfigTree, loc: Path, is_missing: bool) -> Path:
    """Pydantic's location without parts that are not in the config: union members, the index of a one-item list."""
    path: list[str | int] = []
    data: Any = tree.data
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
