"""YAML -> a `Layer` with the line of every value, with `!include` as any value and at the top of a file.

`!include other.yaml` is resolved relative to the including file, can be nested, and works inside a `<<:` merge and
with any URL that fsspec opens. On a separate, unindented line it loads the other file's settings with lower priority
than this file's. Numbers follow YAML 1.2 instead of 1.1: `6E-4` is a float.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer, Origin, Path, lift
from lmtrain.config.spellings import combine
from lmtrain.config.yaml_scalars import Loader

# A config has a few hundred values. Without a limit, ten short lines of aliases to aliases exhaust the memory.
_MOST_VALUES = 100_000

# An unindented !include merges an entire file at the top level; YAML has no syntax for that.
_TOP_INCLUDE = re.compile(r"^!include[ \t]+(?P<path>[^\s#][^#\n]*?)[ \t]*(?:#.*)?$", re.MULTILINE)

# The origins of the !include tags that led to a file, outermost first.
Chain = tuple[Origin, ...]


def load_file(path: str) -> Layer:
    """Load one YAML file and all files it includes. Raises `UserError` with file and line for any error."""
    built = _load_map(path, (), ())
    return combine(Layer(), Layer(built.value, built.origins, built.notices))


def parse_value(text: str, flag: str) -> Any:
    """The value of a command-line override, read as YAML."""
    try:
        node = Loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise UserError(f"{flag}: {text!r} is not valid YAML: {_problem(error)}") from None
    return None if node is None else _Builder(flag).build(node, ()).value


def include_value(path: str, flag: str, at: Path) -> Layer:
    """Load a file named on the command line (`--data "include data/x.yaml"`), nested at the path `at`.

    `path` is relative to the working directory, else to the shipped configs.
    """
    if not path:
        raise UserError(f"{flag}: include needs the path of a file")
    shipped = os.path.join(shipped_configs(), path)
    if "://" not in path and not os.path.exists(path) and os.path.isfile(shipped):
        path = shipped
    built = _load_map(path, (), at)
    return lift(Layer(built.value, built.origins, built.notices), at)


def shipped_configs() -> str:
    """The folder of the shipped configs: inside the installed package, or next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.join(package, "configs")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "configs")


@dataclass
class _Built:
    """A value, the origins of everything in it (by path from the root of the config), notices, and its line."""

    value: Any
    origins: dict[Path, Origin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    line: int = 1


def _load_map(path: str, chain: Chain, at: Path) -> _Built:
    """Load a file that must contain a map of settings."""
    built = _load(path, chain, at)
    if built.value is None:
        return _Built({})
    if not isinstance(built.value, dict):
        raise UserError(f"{path}:{built.line}: expected a map of settings at the top of the file")
    return built


def _load(path: str, chain: Chain, at: Path) -> _Built:
    """Load any file, to be placed at `at` in the config."""
    if path in (origin.source for origin in chain):
        raise UserError(f"circular !include: {' -> '.join([*map(str, chain), path])}")
    text = _read(path, chain)
    own_text, below = _split_top_includes(path, text, chain, at)
    try:
        node = Loader(own_text).get_single_node()
        built = _Built(None) if node is None else _Builder(path, chain, is_file=True).build(node, at)
        built.line = 1 if node is None else node.start_mark.line + 1
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{place}: this is not valid YAML: {_problem(error)}") from None
    if below is None:
        return built
    if built.value is None:
        built.value = {}
    if not isinstance(built.value, dict):
        raise UserError(f"{path}: expected a map of settings, or nothing, below an unindented !include")
    return _under(below, built, at)


def _split_top_includes(path: str, text: str, chain: Chain, at: Path) -> tuple[str, _Built | None]:
    """The text without its unindented includes, and these includes merged, a later one over an earlier one."""
    below: _Built | None = None
    for match in _TOP_INCLUDE.finditer(text):
        origin = Origin(path, text.count("\n", 0, match.start()) + 1)
        loaded = _load_map(_relative_to(path, match["path"]), (*chain, origin), at)
        below = loaded if below is None else _under(below, loaded, at)
    return _TOP_INCLUDE.sub("", text), below


def _under(below: _Built, above: _Built, at: Path) -> _Built:
    """Merge two values at `at`; `above` wins."""
    layers = (lift(Layer(built.value, built.origins, built.notices), at) for built in (below, above))
    result = combine(*layers)
    return _Built(_value_at(result.data, at), result.origins, result.notices)


def _value_at(data: Any, at: Path) -> Any:
    for part in at:
        data = data[part]
    return data


def _read(path: str, chain: Chain) -> str:
    included = f" (included from {' -> '.join(map(str, chain))})" if chain else ""
    try:
        if "://" in path:
            from lmtrain.config.remote import open_fs, told

            with told(path, "read", missing_too=False):
                fs, inside = open_fs(path)
                return str(fs.cat_file(inside).decode())
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{included}") from None
    except UserError as error:
        raise UserError(f"{error}{included}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason}){included}") from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{path}: cannot be read: {error}{included}") from None


def _problem(error: yaml.YAMLError) -> str:
    parts = (getattr(error, "problem", None), getattr(error, "context", None))
    return ", ".join(part for part in parts if part) or str(error)


class _Builder:
    """Converts the YAML nodes of one file to plain data and origins."""

    def __init__(self, source: str, chain: Chain = (), is_file: bool = False):
        self.source = source
        self.chain = chain
        self.is_file = is_file
        self.scalars = Loader("")
        self.open: list[yaml.Node] = []  # the nodes that enclose the current one
        self.count = 0  # values built so far: nested aliases multiply

    def build(self, node: yaml.Node, at: Path) -> _Built:
        self.count += 1
        if self.count > _MOST_VALUES:
            raise UserError(f"{self._origin(node)}: with its aliases this file has more than {_MOST_VALUES:,} values")
        if node.tag == "!include":
            return self._include(node, at)
        if isinstance(node, yaml.ScalarNode):
            return _Built(self._scalar(node))
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise UserError(f"{self._origin(node)}: unknown tag {node.tag!r}; only !include is supported")
        if node in self.open:
            raise UserError(f"{self._origin(node)}: recursive anchor: the value contains itself")
        self.open.append(node)
        built = self._map(node, at) if isinstance(node, yaml.MappingNode) else self._list(node, at)
        self.open.pop()
        return built

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = _problem(error) if isinstance(error, yaml.YAMLError) else error
            raise UserError(f"{self._origin(node)}: {problem}") from None

    def _list(self, node: yaml.Node, at: Path) -> _Built:
        result = _Built([])
        for index, child in enumerate(node.value):
            path = (*at, index)
            built = self.build(child, path)
            result.value.append(built.value)
            result.origins[path] = self._origin(child)
            result.origins.update(built.origins)
            result.notices += built.notices
        return result

    def _map(self, node: yaml.MappingNode, at: Path) -> _Built:
        own = _Built({})
        merged: _Built | None = None
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                new = self._merge_key(value_node, at)
                merged = new if merged is None else _under(merged, new, at)
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a map or a list"
                raise UserError(f"{self._origin(key_node)}: a setting's name must be text, not {shown}")
            path = (*at, key)
            if key in own.value:
                first = own.origins[path]
                raise UserError(f"{self._origin(key_node)}: duplicate key {key!r}; first set at {first}")
            built = self.build(value_node, path)
            own.value[key] = built.value
            own.origins[path] = self._origin(key_node)
            own.origins.update(built.origins)
            own.notices += built.notices
        return own if merged is None else _under(merged, own, at)

    def _merge_key(self, node: yaml.Node, at: Path) -> _Built:
        """The maps of a `<<:`, merged."""
        children = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: _Built | None = None
        for child in reversed(children):  # in YAML the earlier entry of a merge list has priority
            built = self.build(child, at)
            if not isinstance(built.value, dict):
                raise UserError(f"{self._origin(child)}: '<<:' needs a map, or a list of maps")
            result = built if result is None else _under(result, built, at)
        return result or _Built({})

    def _include(self, node: yaml.Node, at: Path) -> _Built:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise UserError(f"{self._origin(node)}: !include needs the path of a file")
        if not self.is_file:
            raise UserError(f'{self.source}: write "include {node.value}" (without !) on the command line')
        return _load(_relative_to(self.source, node.value), (*self.chain, self._origin(node)), at)

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1 if self.is_file else None)


def _relative_to(including: str, path: str) -> str:
    if "://" in path or os.path.isabs(path):
        return path
    if "://" in including:
        return including.rsplit("/", 1)[0] + "/" + path
    return os.path.normpath(os.path.join(os.path.dirname(including), path))
