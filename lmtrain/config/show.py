"""A resolved config as YAML, each value with its origin."""

from collections.abc import Iterator
from typing import Any

from lmtrain.config.describe import written
from lmtrain.config.tree import ConfigTree, Path

_MAX_WIDTH = 60


def show(resolved: dict[str, Any], tree: ConfigTree) -> str:
    """YAML that loads as the same config; comments give the origin: file and line, the flag, or `default`."""
    lines = list(_lines(resolved, tree, (), ""))
    width = min(max((len(text) for text, _ in lines), default=0), _MAX_WIDTH)
    return "".join(f"{text:<{width}}  # {place}\n" if place else f"{text}\n" for text, place in lines)


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
