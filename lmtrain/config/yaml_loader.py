"""YAML -> a `ConfigTree` with the line of every value, with `!include` as any value and at the top of a file.

    !include base.yaml                # unindented: settings of lower priority than this file's
    data: !include data/web.yaml      # a value; relative to this file, or any URL that fsspec opens
    optimizer:
      <<: !include optim/muon.yaml    # a merge key: the settings below have priority
      learning_rate: 6E-4             # a number, as in YAML 1.2; in YAML 1.1 it is text

Includes can be nested.
"""

import io
import os
import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from lmtrain.config.spellings import combine
from lmtrain.config.tree import ConfigTree, Origin, Path, lift, value_at
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact
from lmtrain.runtime.text import not_utf8


class TooManyNodesError(Exception):
    """A text has more nodes than it may. `line` is that of the first one too many, from 0."""

    def __init__(self, what: str, line: int):
        super().__init__(what)
        self.line = line


class Loader(yaml.SafeLoader):
    """Composes nodes and constructs scalars; `yaml_loader.py` converts maps and lists."""

    max_nodes = 200_000  # keys and values
    max_keys = 5000  # of a map
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. Raises `TooManyNodesError`."""
        self.num_nodes += 1
        if self.num_nodes > self.max_nodes:
            raise TooManyNodesError(f"more than {self.max_nodes:,} values", self.peek_event().start_mark.line)
        if isinstance(parent, yaml.MappingNode) and index is None and len(parent.value) >= self.max_keys:
            raise TooManyNodesError(f"a map with more than {self.max_keys:,} names", self.peek_event().start_mark.line)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _use_yaml_1_2_numbers() -> None:
    """Replace the number rules of PyYAML, which follows YAML 1.1: it reads 6E-4 as text, 010 as 8 and 1:30 as 90."""
    int_tag, float_tag = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (int_tag, float_tag)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = {
        int_tag: r"[-+]?\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+",
        float_tag: r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    }
    for tag, pattern in numbers.items():  # in this order: int before float
        Loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))

    def construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
        text = node.value.replace("_", "")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    Loader.add_constructor(int_tag, construct_int)


_use_yaml_1_2_numbers()


# A config has a few hundred values, in a few files. Without limits, ten short lines of aliases to aliases, or of
# includes of files with includes, exhaust the memory.
MAX_VALUES = 100_000
MAX_BYTES = 10_000_000
MAX_FILES = 1000
_MAX_INCLUDES = 20
_MAX_DEPTH = 100
_MAX_DIGITS = 4000  # Python converts no more at once

# An unindented !include merges an entire file at the top level; YAML has no syntax for that.
_TOP_INCLUDE = re.compile(r"^!include[ \t]+(?P<path>[^\s#][^#\n]*?)[ \t]*(?:#.*)?$", re.MULTILINE)

# The origins of the !include tags that led to a file, outermost first.
Chain = tuple[Origin, ...]


@dataclass
class _Read:
    """What has been read of a config so far, with its includes."""

    files: int = 0
    values: int = 0


def load_file(path: str) -> ConfigTree:
    """Load one YAML file and all files it includes. Raises `UserError` with file and line for any error."""
    return combine(ConfigTree(), _load_map(path, (), (), _Read()))


def parse_value(text: str, flag: str) -> Any:
    """The value of a command-line override, read as YAML."""
    try:
        node = _compose(text, flag)
        return None if node is None else _Builder(flag, _Read()).build(node, ()).data
    except RecursionError:
        raise UserError(f"{flag}: nested too deeply") from None
    except yaml.YAMLError as error:
        (shown,) = redact({flag.rpartition(".")[2]: text}).values()
        raise UserError(f"{flag}: {shown!r} is not valid YAML: {_problem(error)}") from None


def _compose(text: str, source: str, is_file: bool = False) -> yaml.Node | None:
    """The nodes of a YAML text. Raises `UserError` if they are too many, before all are read."""
    loader = Loader(text)
    node: yaml.Node | None
    try:
        node = loader.get_single_node()
    except TooManyNodesError as error:
        place = Origin(source, error.line + 1 if is_file else None)
        raise UserError(f"{place}: {error}; is it a config?") from None
    return node


def include_value(path: str, flag: str, at: Path) -> ConfigTree:
    """Load a file named on the command line (`--data "include data/x.yaml"`), nested at the path `at`.

    `path` is relative to the working directory, else to the shipped configs.
    """
    if not path:
        raise UserError(f"{flag}: include needs the path of a file")
    shipped = os.path.join(shipped_configs(), path)
    if "://" not in path and not os.path.exists(path) and os.path.isfile(shipped):
        path = shipped
    return lift(_load_map(path, (), at, _Read()), at)


def shipped_configs() -> str:
    """The folder of the shipped configs: inside the installed package, or next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.join(package, "configs")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "configs")


def _load_map(path: str, chain: Chain, at: Path, so_far: _Read) -> ConfigTree:
    """Load a file that must contain a map of settings, or nothing."""
    tree = _load(path, chain, at, so_far, needs_map=True)
    return ConfigTree() if tree.data is None else tree


def _load(path: str, chain: Chain, at: Path, so_far: _Read, needs_map: bool = False) -> ConfigTree:
    """Load any file, to be placed at `at` in the config. As in all trees below, data is the value at `at` alone."""
    if path in (origin.source for origin in chain):
        raise UserError(f"circular !include: {' -> '.join([*map(str, chain), path])}")
    so_far.files += 1
    if len(chain) > _MAX_INCLUDES or so_far.files > MAX_FILES:
        limit = f"{_MAX_INCLUDES} files deep" if len(chain) > _MAX_INCLUDES else f"of more than {MAX_FILES:,} files"
        raise UserError(f"{chain[-1] if chain else path}: an !include {limit}; is one of them included by mistake?")
    text = _read(path, chain)
    below = ConfigTree(None)
    for match in _TOP_INCLUDE.finditer(text):
        origin = Origin(path, text.count("\n", 0, match.start()) + 1)
        below = _under(below, _load_map(_relative_to(path, match["path"]), (*chain, origin), at, so_far), at)
    try:
        node = _compose(_TOP_INCLUDE.sub("", text), path, is_file=True)
        tree = ConfigTree(None) if node is None else _Builder(path, so_far, chain, is_file=True).build(node, at)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Origin(path, mark.line + 1 if mark else None)
        raise UserError(f"{place}: this is not valid YAML: {_problem(error)}") from None
    is_map = tree.data is None or isinstance(tree.data, dict)
    if node is not None and not is_map and (needs_map or below.data is not None):
        raise UserError(f"{Origin(path, node.start_mark.line + 1)}: expected a map of settings at the top of the file")
    return _under(below, tree, at)


def _under(below: ConfigTree, above: ConfigTree, at: Path) -> ConfigTree:
    """Merge two trees at `at`; `above` wins. A tree without data changes nothing."""
    if below.data is None or above.data is None:
        return below if above.data is None else above
    merged = combine(lift(below, at), lift(above, at))
    return replace(merged, data=value_at(merged.data, at))


def _read(path: str, chain: Chain) -> str:
    included = f" (included from {' -> '.join(map(str, chain))})" if chain else ""
    try:
        content = _content(path)
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{included}") from None
    except UserError as error:
        raise UserError(f"{error}{included}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {not_utf8(error)}{included}") from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{path}: cannot be read: {error}{included}") from None


def _content(path: str) -> bytes:
    """Content of a file. Raises `UserError` if it is larger than a config may be."""
    local = path.removeprefix("file://")
    if "://" in local:
        from lmtrain.runtime.remote import read_small, remote_errors

        with remote_errors(path, "read", missing_too=False):
            content = read_small(path, MAX_BYTES)
        if content is None:
            raise _too_large(path)
        return content
    if os.path.exists(local) and not os.path.isfile(local) and not os.path.isdir(local):
        raise UserError(f"{path}: not a regular file")  # reading a device or a pipe may never end
    with open(local, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _too_large(path)
    return content


def _too_large(path: str) -> UserError:
    return UserError(f"{path}: larger than {MAX_BYTES:,} bytes; is it a config?")


def _problem(error: yaml.YAMLError) -> str:
    parts = (getattr(error, "problem", None), getattr(error, "context", None))
    if "'\\t'" in str(parts[0]):
        return "a tab, which cannot indent a line or start a value; use spaces"
    return ", ".join(part for part in parts if part) or str(error)


class _Builder:
    """Converts the YAML nodes of one file to plain data and origins."""

    def __init__(self, source: str, so_far: _Read, chain: Chain = (), is_file: bool = False):
        self.source = source
        self.so_far = so_far
        self.chain = chain
        self.is_file = is_file
        self.scalars = Loader("")
        self.open: list[yaml.Node] = []  # the nodes that enclose the current one

    def build(self, node: yaml.Node, at: Path) -> ConfigTree:
        self.so_far.values += 1  # nested aliases and includes multiply
        if self.so_far.values > MAX_VALUES:
            raise UserError(f"{self._origin(node)}: with aliases and includes more than {MAX_VALUES:,} values")
        if len(self.open) > _MAX_DEPTH:
            raise UserError(f"{self._origin(node)}: nested too deeply")
        if node.tag == "!include":
            return self._include(node, at)
        if isinstance(node, yaml.ScalarNode):
            return ConfigTree(self._scalar(node))
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
            problem: Any = _problem(error) if isinstance(error, yaml.YAMLError) else error
            if len(node.value) > _MAX_DIGITS:
                problem = f"a number with {len(node.value):,} digits"
            raise UserError(f"{self._origin(node)}: {problem}") from None

    def _list(self, node: yaml.Node, at: Path) -> ConfigTree:
        result = ConfigTree([])
        for index, child in enumerate(node.value):
            path = (*at, index)
            built = self.build(child, path)
            result.data.append(built.data)
            result.origins[path] = self._origin(child)
            result.origins.update(built.origins)
            result.notices += built.notices
        return result

    def _map(self, node: yaml.MappingNode, at: Path) -> ConfigTree:
        own, merged = ConfigTree(), ConfigTree(None)
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged = _under(merged, self._merge_key(value_node, at), at)
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a map or a list"
                raise UserError(f"{self._origin(key_node)}: a setting's name must be text, not {shown}")
            path = (*at, key)
            if key in own.data:
                first = own.origins[path]
                raise UserError(f"{self._origin(key_node)}: duplicate key {key!r}; first set at {first}")
            built = self.build(value_node, path)
            own.data[key] = built.data
            own.origins[path] = self._origin(key_node)
            own.origins.update(built.origins)
            own.notices += built.notices
        return _under(merged, own, at)

    def _merge_key(self, node: yaml.Node, at: Path) -> ConfigTree:
        """The maps of a `<<:`, merged."""
        children = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result = ConfigTree(None)
        for child in reversed(children):  # in YAML the earlier entry of a merge list has priority
            built = self.build(child, at)
            if not isinstance(built.data, dict):
                raise UserError(f"{self._origin(child)}: '<<:' needs a map, or a list of maps")
            result = _under(result, built, at)
        return result

    def _include(self, node: yaml.Node, at: Path) -> ConfigTree:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise UserError(f"{self._origin(node)}: !include needs the path of a file")
        if not self.is_file:
            raise UserError(f'{self.source}: write "include {node.value}" (without !) on the command line')
        path = _relative_to(self.source, node.value)
        built = _load(path, (*self.chain, self._origin(node)), at, self.so_far)
        if isinstance(built.data, str):  # later messages would quote a file that may hold anything, such as a password
            raise UserError(f"{path}: holds a text, not settings (included from {self._origin(node)})")
        return built

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1 if self.is_file else None)


def _relative_to(including: str, path: str) -> str:
    if "://" in path or os.path.isabs(path):
        return path
    if "://" in including:
        return including.rsplit("/", 1)[0] + "/" + path
    return os.path.normpath(os.path.join(os.path.dirname(including), path))
