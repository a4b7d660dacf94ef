"""CONFIG and overrides -> one validated object, or one report of all problems with file and line."""

import json
import os
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from lmtrain.config.describe import known_paths
from lmtrain.config.spellings import OTHER_NAMES, combine, other_names, without_settings_of_other_types
from lmtrain.config.tree import ConfigTree, Origin, Path, dotted, lift
from lmtrain.config.yaml_loader import include_value, load_file, parse_value, shipped_configs
from lmtrain.runtime.errors import UserError, suggest_name
from lmtrain.runtime.redact import redact
from lmtrain.runtime.text import require_utf8

_EXPECTED = "Input should be "
_SHOWN_CHARACTERS = 60
_SHOWN_PROBLEMS = 300
_SHOWN_NAMES = 3
# Settings of other systems that are not used with 0 or -1.
_OFF_AT_ZERO = ("val_set_size", "val_split_fraction", "max_steps", "save_total_limit", "neftune_noise_alpha")
# Settings whose keys users choose.
_MAPS = ("configs", "train_weights", "source_weights", "chat_template_kwargs", "init", "arguments")


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


def first_problem(error: ValidationError) -> tuple[Path, str, Any]:
    """The setting's path, the message and the value of the first problem, for one value that is no part of a file."""
    first = error.errors(include_url=False)[0]
    return _named(first["loc"], first), _message(first), first["input"]


def _named(path: Path, problem: Any) -> Path:
    """The path of a setting. A validator of a section names it with `field_error`."""
    return (*path, *problem["ctx"]["field"].split(".")) if problem["type"] == "field" else path


def _message(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")


def _describe(model: type[BaseModel], tree: ConfigTree, path: Path, problems: list[Any]) -> str:
    """File and line, dotted path, what was expected, the value, and a suggestion if there is one."""
    kind, seen, context = problems[0]["type"], problems[0]["input"], problems[0].get("ctx", {})
    if kind == "union_tag_invalid":
        return _describe_type(tree, path, seen, context)
    path = _named(path, problems[0])
    where = tree.origin_of(path)
    place = f"{where}: " if where else ""
    name = dotted(path)
    if str(where) == f"--{name}":
        place = "--"  # the flag is the name
    if kind == "extra_forbidden":
        if len(path) > 1 and isinstance(path[-2], int):
            sections = ".".join(part for part in path[:-1] if isinstance(part, str))
            return f"{place}{name}: no such setting; `lmtrain train --help {sections}` lists the settings of an entry"
        if (advice := other_names("settings").get(str(path[-1]))) is not None:
            return f"{place}{name}: no such setting; {'remove it' if _is_off(path[-1], seen, advice) else advice}"
        if (of_kind := _kind_without(model, tree, path)) is not None:
            return f"{place}{name}: no such setting {of_kind}"
        same = [known for known in known_paths(model, tree.data) if known.rpartition(".")[2] == path[-1]]
        if same := list(dict.fromkeys(same)):
            return f"{place}{name}: no such setting; did you mean {' or '.join(same[:_SHOWN_NAMES])}?"
        others = {other: right for other, right in OTHER_NAMES.items() if other.partition(".")[0] in model.model_fields}
        hint = suggest_name(name, [*known_paths(model, tree.data), *others])
        hint = others.get(hint or "", hint)
        if hint == name:  # written with its dots in a file
            return f"{place}{name}: no such setting; in a file, write {path[-1]!r} as nested, indented maps"
        return f"{place}{name}: no such setting" + (f"; did you mean {hint}?" if hint else "")
    if kind == "missing":
        return f"{place}{name}: this setting is required"
    message = _message(problems[0])
    if kind == "int_parsing_size":
        message = "expected a whole number below 9e18"
    if kind == "string_pattern_mismatch":
        message = f"expected a text of the form {context['pattern']}"
        if "/" in context["pattern"] and "_" in str(seen):
            message += f", such as {str(seen).replace('_', '/', 1)}"
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


def _is_off(name: str | int, value: Any, advice: str) -> bool:
    """Whether a value of another system means that its setting is not used."""
    if value in (None, "", [], {}) or (value is False and "loss" not in advice):
        return True
    return name in _OFF_AT_ZERO and value in (0, -1)


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
        advice = other_names("types").get(str(seen).lower())
        more = f"; {advice}" if advice else ""
        return f"{where}: {dotted(path)}: expected a map with type: {_or(known)}, not {_as_written(seen)}{more}"
    what = next(part for part in reversed(path) if isinstance(part, str))
    path = (*path, "type")
    place = "--" if str(tree.origin_of(path)) == f"--{dotted(path)}" else f"{tree.origin_of(path)}: "
    if (advice := other_names("types").get(str(seen["type"]).lower())) is not None and what != "model":
        return f"{place}{dotted(path)}: no such {what} {_as_written(seen['type'])}; {advice}"
    hint = suggest_name(str(seen["type"]), known)
    if (family := other_names("families").get(str(seen["type"]).lower())) in known:
        advice = f"set type: {family}, with its sizes or, for weights of the hub, use_hf_model_config: true"
        return f"{place}{dotted(path)}: {_as_written(seen['type'])} is a {family}: {advice}"
    advice = f"did you mean {hint!r}?" if hint else f"expected {_or(known)}"
    return f"{place}{dotted(path)}: no such {what} {_as_written(seen['type'])}; {advice}"


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


def canonical(flag: str) -> str:
    """A flag with `_` for `-`, but at its start and in keys that users choose: --dry-run and --dry_run are one."""
    if not flag.startswith("--"):
        return flag
    parts: list[str] = []
    for part in flag.removeprefix("--").split("."):
        parts.append(part if parts and parts[-1] in _MAPS else part.replace("-", "_"))
    return "--" + ".".join(parts)


def split_overrides(argv: Sequence[str], own_flags: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate the arguments of a subcommand from overrides of the config.

    `own_flags` are the flags of the subcommand (`--output`); every other `--name` is an override and takes the next
    argument as its value unless it has `=`. Returns the remaining arguments, and (name, value text) pairs in order.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    own = {canonical(flag): flag for flag in own_flags}
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        name, equals, value = argument.partition("=")
        name = canonical(name)
        if not argument.startswith("--") or argument == "--" or name in own:
            rest.append(argument)
            continue
        if (advice := other_names("switches").get(name.removeprefix("--"))) is not None:
            raise UserError(f"{name}: no such setting; {advice}")
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                if (advice := other_names("settings").get(name.removeprefix("--"))) is not None:
                    raise UserError(f"{name}: no such setting; {advice}")
                raise UserError(f"{name} needs a value, for example {name} VALUE")
            value = argv[position]
            position += 1
        overrides.append((name.removeprefix("--"), value))
    return rest, overrides


def apply_overrides(
    tree: ConfigTree,
    overrides: Sequence[tuple[str, str]],
    make_room: Callable[[ConfigTree, ConfigTree], ConfigTree] = lambda under, over: under,
) -> ConfigTree:
    """Apply the overrides to `tree` in order; a later one wins over an earlier one.

    `make_room` removes settings of the lower tree that conflict with an override.
    """
    for name, text in overrides:
        flag = f"--{name}"
        if "," in name:
            raise UserError(f"{flag}: no such setting; did you mean --{name.replace(',', '.')}?")
        path: Path = tuple(name.split("."))
        if not all(path):
            raise UserError(f"{flag}: expected a dotted name such as --trainer.num_train_steps")
        if not text.strip():
            raise UserError(f"{flag}: the value is empty, as an unset variable of a shell is; write null for no value")
        require_utf8(f"{name}={text}", flag)
        if text.startswith("include "):
            new = include_value(text.removeprefix("include ").strip(), flag, path)
        else:
            new = lift(ConfigTree(parse_value(text, flag)), path)
        new.origins |= {path[: end + 1]: Origin(flag) for end in range(len(path))}
        tree = combine(make_room(tree, new), new)
    return tree


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
