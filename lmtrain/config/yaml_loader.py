"""YAML -> a `Layer`, remembering the line of every value, with `!include` on any value.

`!include other.yaml` is resolved relative to the file it stands in, nests, works inside a `<<:` merge and on any URL
that fsspec opens. Numbers follow YAML 1.2 where 1.1 surprises: `6E-4` is a float.
"""

import os
import re
from typing import Any

import yaml

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer, Origin, Path, merge

# A config has a few hundred; without a limit ten short lines of aliases to aliases fill the memory.
_MOST_VALUES = 100_000

# The places of the !include tags that led to a file, outermost first.
Chain = tuple[Origin, ...]


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with YAML 1.2 numbers; it only composes nodes and scalars, `_Builder` does the rest."""


def _use_yaml_1_2_numbers() -> None:
    """YAML 1.1, which PyYAML reads, takes 6E-4 for text, 010 for 8 and 1:30 for 90."""
    int_tag, float_tag = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (int_tag, float_tag)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = {
        int_tag: r"[-+]?\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+",
        float_tag: r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    }
    for tag, pattern in numbers.items():  # in this order: what is an int is not tried as a float
        _Loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))

    def construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
        text = node.value.replace("_", "")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    _Loader.add_constructor(int_tag, construct_int)


_use_yaml_1_2_numbers()


def load_file(path: str) -> Layer:
    """Load one YAML file and all it includes. Raises `UserError` with file and line for anything wrong."""
    return _load(path, chain=())


def parse_value(text: str, flag: str) -> Any:
    """The value of a command-line override, read as YAML."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise UserError(f"{flag}: {text!r} is not valid YAML: {_problem(error)}") from None
    return None if node is None else _Builder(flag).build(node, ()).value


def include_value(path: str, flag: str) -> Layer:
    """A file named on the command line (`--data "include data/x.yaml"`), relative to the working directory."""
    if not path:
        raise UserError(f"{flag}: include needs the path of a file")
    return _load(path, chain=())


def _load(path: str, chain: Chain) -> Layer:
    if path in (origin.source for origin in chain):
        raise UserError(f"!include goes in a circle: {' -> '.join([*map(str, chain), path])}")
    text = _read(path, chain)
    try:
        return _layer(path, chain, _Loader(text).get_single_node())
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{place}: this is not valid YAML: {_problem(error)}") from None


def _layer(path: str, chain: Chain, node: yaml.Node | None) -> Layer:
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return Layer()
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: expected a map of settings at the top of the file")
    built = _Builder(path, chain, is_file=True).build(node, ())
    return Layer(built.value, built.origins)


def _read(path: str, chain: Chain) -> str:
    included = f" (included from {' -> '.join(map(str, chain))})" if chain else ""
    try:
        if "://" in path:
            import fsspec  # imports slowly, and most configs are local files

            with fsspec.open(path, "r", encoding="utf-8") as file:
                return file.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError as error:
        cause = error.__cause__  # over HTTP fsspec calls every failure a missing file
        missing = cause is None or getattr(cause, "status", None) == 404
        raise UserError(f"{path}: {'no such file' if missing else f'cannot be read: {cause}'}{included}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason}){included}") from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{path}: cannot be read: {error}{included}") from None


def _problem(error: yaml.YAMLError) -> str:
    parts = (getattr(error, "problem", None), getattr(error, "context", None))
    return ", ".join(part for part in parts if part) or str(error)


class _Built:
    def __init__(self, value: Any, origins: dict[Path, Origin]):
        self.value = value
        self.origins = origins


class _Builder:
    """Turns composed YAML nodes of one file into plain data and origins."""

    def __init__(self, source: str, chain: Chain = (), is_file: bool = False):
        self.source = source
        self.chain = chain
        self.is_file = is_file
        self.scalars = _Loader("")
        self.open: list[yaml.Node] = []  # the nodes around the one being built
        self.count = 0  # values built so far: aliases of aliases multiply

    def build(self, node: yaml.Node, at: Path) -> _Built:
        self.count += 1
        if self.count > _MOST_VALUES:
            raise UserError(f"{self._origin(node)}: with its aliases this file has more than {_MOST_VALUES:,} values")
        if node.tag == "!include":
            return self._include(node, at)
        if isinstance(node, yaml.ScalarNode):
            return _Built(self._scalar(node), {})
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise UserError(f"{self._origin(node)}: no such tag {node.tag!r}; only !include is known")
        if node in self.open:
            raise UserError(f"{self._origin(node)}: an anchor stands for a value that contains itself")
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
        values, origins = [], {}
        for index, child in enumerate(node.value):
            path = (*at, index)
            built = self.build(child, path)
            values.append(built.value)
            origins[path] = self._origin(child)
            origins.update(built.origins)
        return _Built(values, origins)

    def _map(self, node: yaml.MappingNode, at: Path) -> _Built:
        own = Layer()
        merged = Layer()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged = merge(merged, self._merge_key(value_node, at))
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a map or a list"
                raise UserError(f"{self._origin(key_node)}: a setting's name must be text, not {shown}")
            path = (*at, key)
            if key in own.data:
                first = own.origins[path]
                raise UserError(f"{self._origin(key_node)}: {key!r} is given twice; the first is at {first}")
            built = self.build(value_node, path)
            own.data[key] = built.value
            own.origins[path] = self._origin(key_node)
            own.origins.update(built.origins)
        if not merged.data:
            return _Built(own.data, own.origins)
        result = merge(merged, _lift(own, at))
        value: Any = result.data
        for part in at:
            value = value[part]
        return _Built(value, result.origins)

    def _merge_key(self, node: yaml.Node, at: Path) -> Layer:
        """The maps of a `<<:`, merged, in a tree that has them at `at`: `merge` works on whole trees."""
        children = node.value if isinstance(node, yaml.SequenceNode) else [node]
        layer = Layer()
        for child in reversed(children):  # in YAML the earlier entry of a merge list wins
            built = self.build(child, at)
            if not isinstance(built.value, dict):
                raise UserError(f"{self._origin(child)}: '<<:' needs a map, or a list of maps")
            layer = merge(layer, _lift(Layer(built.value, built.origins), at))
        return layer

    def _include(self, node: yaml.Node, at: Path) -> _Built:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise UserError(f"{self._origin(node)}: !include needs the path of a file")
        if not self.is_file:
            raise UserError(f'{self.source}: write "include {node.value}" (without !) on the command line')
        loaded = _load(_relative_to(self.source, node.value), (*self.chain, self._origin(node)))
        return _Built(loaded.data, {(*at, *path): origin for path, origin in loaded.origins.items()})

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1 if self.is_file else None)


def _lift(layer: Layer, at: Path) -> Layer:
    data: Any = layer.data
    for part in reversed(at):
        data = {part: data}
    return Layer(data, layer.origins)


def _relative_to(including: str, path: str) -> str:
    if "://" in path or os.path.isabs(path):
        return path
    if "://" in including:
        return including.rsplit("/", 1)[0] + "/" + path
    return os.path.normpath(os.path.join(os.path.dirname(including), path))
