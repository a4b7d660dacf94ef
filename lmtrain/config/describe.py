"""All settings as text, from the Pydantic models: for `--help`, `config show` and configs/guide/settings.md."""

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmtrain.config.section import format_duration, role_of
from lmtrain.config.tree import ConfigTree, Path, value_at
from lmtrain.runtime.errors import UserError, suggest_name

_WORDS = {int: "int", float: "float", str: "text", bool: "true/false", timedelta: "duration", type(None): "null"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its dotted name, its type and default as written in YAML, its description and its role, if any."""

    name: str
    type: str
    default: str
    description: str
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The settings of one class.

    `section` is their dotted path in the config, "" for the top level. `kinds` are the types of the section that have
    these settings; empty: all types.
    """

    section: str
    kinds: tuple[str, ...]
    doc: str
    settings: list[Setting]

    @property
    def title(self) -> str:
        """`optimizer (type: adam)`."""
        section = self.section or "top level"
        return f"{section} (type: {', '.join(self.kinds)})" if self.kinds else section


def describe(model: type[BaseModel], at: str = "") -> list[Group]:
    """All groups below `model`. Settings shared by several kinds of a section come once, before those of each kind."""
    listed = list(_groups(model, at, None))
    groups: dict[tuple[str, type], Group] = {}
    for section, _, cls, settings in listed:
        of_section = {kind for other, kind, *_ in listed if other == section}
        kinds = [kind for other, kind, defined_in, _ in listed if (other, defined_in) == (section, cls)]
        some = () if of_section == set(kinds) else tuple(filter(None, kinds))
        groups.setdefault((section, cls), Group(section=section, kinds=some, doc=_doc(cls), settings=settings))
    return list(groups.values())


# What is listed of the sections: their names only.
SECTIONS, ALL = "sections", "all"
# Name of the settings that are in no section.
TOP = "top"


def format_settings(groups: list[Group], wanted: str = SECTIONS) -> str:
    """The settings of a section and of those in it as text for a terminal; of `ALL`; or the names of the `SECTIONS`.

    Raises `UserError` if there is no such section.
    """
    named = [(group.section.replace("[]", "") or TOP, group) for group in groups]
    names = {name: group.doc for name, group in reversed(named)}
    if wanted == SECTIONS:
        width = max(len(name) for name in names if "." not in name)
        lines = ["sections of settings, which are --section.field VALUE or in a file; `--help all` lists them all:"]
        lines += [
            f"  {name:{width}}  {doc.partition('. ')[0]}" for name, doc in reversed(names.items()) if "." not in name
        ]
        return "\n".join(lines) + "\n"
    inside = [group for name, group in named if wanted == ALL or f"{name}.".startswith(f"{wanted}.")]
    if not inside:
        near = suggest_name(wanted, list(names))
        raise UserError(
            f"--help {wanted}: no such section; " + (f"did you mean {near}?" if near else f"one of: {', '.join(names)}")
        )
    lines = ["settings, as --section.field VALUE or in a file:"]
    for group in inside:
        lines += ["", f"{group.title}: {group.doc}"]
        lines += [
            f"  --{setting.name}\n        {setting.description}\n        {setting.type}, default {setting.default}"
            for setting in group.settings
        ]
    return "\n".join(lines) + "\n"


def _groups(model: type[BaseModel], at: str, kind: str | None) -> Iterator[tuple[str, str | None, type, list[Setting]]]:
    """(section, its kind, the class that defines the settings, the settings); classes without settings are omitted."""
    by_class: dict[type, list[Setting]] = {}
    below: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        path = f"{at}.{name}" if at else name
        sections = sections_of(field.annotation)
        if name == "type" and kind is not None:
            continue  # it is in the title of the group
        if not sections or not _only_sections(field.annotation):
            by_class.setdefault(_defined_in(model, name), []).append(_setting(path, field))
        below += [(path + entry_name(field.annotation), section) for section in sections]
    for cls, settings in by_class.items():
        yield at, kind, cls, settings
    for path, section in below:
        yield from _groups(section, path, kind_of(section))


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The section classes in an annotation, including those inside lists, maps and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def type_name(annotation: Any) -> str:
    """Readable name of a type: `int`, `text | null`, `list of text`, `cosine | linear`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(parts[0])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(part) for part in parts))
    if _is_list(annotation):
        return f"list of {type_name(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_name, parts))}]"
    if origin is dict:
        return f"map of {type_name(parts[0])} to {type_name(parts[1])}"
    return _WORDS.get(annotation, "map")


def written(value: Any) -> str:
    """A default value in YAML."""
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, list):
        value = [_without_defaults(item) if isinstance(item, BaseModel) else item for item in value]
    readable = "\x85" not in str(value)  # YAML reads it as a line break, but PyYAML prints it unescaped
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=readable, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _without_defaults(section: BaseModel) -> dict[str, Any]:
    """The settings of a section that differ from their defaults, with its type first."""
    kind = {"type": section.type} if hasattr(section, "type") else {}
    return kind | section.model_dump(mode="json", exclude_defaults=True)


def _setting(path: str, field: FieldInfo) -> Setting:
    default = "required" if field.is_required() else written(field.get_default(call_default_factory=True))
    return Setting(
        name=path,
        type=type_name(field.annotation),
        default=default,
        description=field.description or "",
        role=role_of(field) or "",
    )


def _defined_in(model: type[BaseModel], name: str) -> type:
    return next(cls for cls in model.__mro__ if name in inspect.get_annotations(cls))


def _only_sections(annotation: Any) -> bool:
    """Whether the value is always a section. A value that may also be a scalar, list or map counts as a setting."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, Union, types.UnionType):
        return all(_only_sections(part) for part in (parts[:1] if origin is Annotated else parts))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_list(annotation: Any) -> bool:
    """Whether this is a list, or a tuple of any length, which a list in a file becomes."""
    return get_origin(annotation) is list or (get_origin(annotation) is tuple and get_args(annotation)[-1] is ...)


def entry_name(annotation: Any) -> str:
    """What follows the name of a list or map of sections in names of their settings: `[]` or `.<name>`."""
    origin = get_origin(annotation)
    if origin is dict:
        return ".<name>"
    if _is_list(annotation) and sections_of(annotation):
        return "[]"
    return next(filter(None, map(entry_name, get_args(annotation))), "")


def kind_of(section: type[BaseModel]) -> str | None:
    """The `type` of one of several kinds of a section."""
    field = section.model_fields.get("type")
    return field.default if field is not None and len(get_args(field.annotation)) == 1 else None


def _doc(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def known_paths(model: type[BaseModel], data: Any) -> list[str]:
    """Dotted names of all settings of `model`, without those in lists; of a union, those of the member that `data`
    selects by `type`."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(name)
        sections = sections_of(field.annotation)
        entries = {"": value_at(data, (name,))}
        if entry_name(field.annotation) == ".<name>":
            entries = {f"{key}.": entry for key, entry in entries[""].items()} if isinstance(entries[""], dict) else {}
        elif entry_name(field.annotation) == "[]" and not isinstance(entries[""], dict):
            entries = {}
        for key, values in entries.items():
            kind = values.get("type") if isinstance(values, dict) else None
            chosen = [section for section in sections if kind is not None and kind_of(section) == kind]
            for section in chosen or sections:
                paths.extend(f"{name}.{key}{path}" for path in known_paths(section, values))
    return paths


_MAX_WIDTH = 60


def show(resolved: dict[str, Any], tree: ConfigTree) -> str:
    """YAML that loads as the same config; comments give the origin: file and line, the flag, or `default`."""
    lines = list(_lines(resolved, tree, (), ""))
    width = min(max((len(text) for text, _ in lines), default=0), _MAX_WIDTH)
    return "".join(f"{text:<{width}}  # {place}\n" if place else f"{text}\n" for text, place in lines)


def without_defaults(resolved: dict[str, Any], tree: ConfigTree, at: Path = ()) -> dict[str, Any]:
    """The settings that a file or the command line has."""
    found: dict[str, Any] = {}
    for name, value in resolved.items():
        path = (*at, name)
        if isinstance(value, dict) and value:
            value = without_defaults(value, tree, path)
            found |= {name: value} if value else {}
        elif (isinstance(value, list) and value_at(tree.data, path) is not None) or _place(tree, path) != "default":
            found[name] = value
    return found


def _lines(value: dict[str, Any], tree: ConfigTree, at: Path, indent: str) -> Iterator[tuple[str, str]]:
    """Text and origin of each line; a section's `type` comes first."""
    for name in sorted(value, key=lambda name: name != "type"):
        path, item = (*at, name), value[name]
        if isinstance(item, dict) and item:
            yield f"{indent}{written(name)}:", ""
            yield from _lines(item, tree, path, indent + "  ")
        elif isinstance(item, list) and item and all(isinstance(entry, dict) and entry for entry in item):
            yield f"{indent}{written(name)}:", ""
            for index, entry in enumerate(item):
                for number, (text, place) in enumerate(_lines(entry, tree, (*path, index), "")):
                    yield f"{indent}{'- ' if number == 0 else '  '}{text}", place
        else:
            yield f"{indent}{written(name)}: {written(item)}", _place(tree, path)


def _place(tree: ConfigTree, path: Path) -> str:
    """Origin of the value at `path`; `default` if it is not set explicitly."""
    data: Any = tree.data
    written_at: list[str | int] = []
    for part in path:
        if isinstance(data, dict) and part == 0:
            continue  # a list of one may be written as its one item
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return "default"
        written_at.append(part)
    return str(tree.origin_of(tuple(written_at)) or "default")
