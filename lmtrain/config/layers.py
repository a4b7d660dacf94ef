"""A layer of settings: plain data, and the origin (file and line, or flag) of every value.

The settings of a run are layers merged in order: included files, the config file, the command line. Maps are merged
key by key, everything else is replaced, and a value keeps its origin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a file and its line (counted from 1), or a command-line flag (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass
class Layer:
    """Data as loaded from YAML (maps, lists, scalars), and in `origins` an entry for every map entry and list item.

    `notices` are messages for the user, one line each.
    """

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def origin_of(self, path: Path) -> Origin | None:
        """The origin of `path`, or of the nearest enclosing value that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return None


def merge(under: Layer, over: Layer) -> Layer:
    """Merge two layers; `over` wins. Maps are merged recursively, lists and scalars are replaced."""
    origins = dict(under.origins)
    data = _merge_maps(under.data, over.data, (), origins)
    origins.update(over.origins)
    return Layer(data, origins, [*under.notices, *over.notices])


def _merge_maps(under: dict[str, Any], over: dict[str, Any], at: Path, origins: dict[Path, Origin]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        path = (*at, key)
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge_maps(merged[key], value, path, origins)
        else:
            # the origins of values below a replaced value are no longer valid
            for stale in [p for p in origins if p[: len(path)] == path]:
                del origins[stale]
            merged[key] = value
    return merged


def lift(layer: Layer, at: Path) -> Layer:
    """The layer with its data nested at the path `at`. Its origins already have paths from the root."""
    data: Any = layer.data
    for part in reversed(at):
        data = {part: data}
    return Layer(data, layer.origins, layer.notices)


def walk_leaves(data: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a non-empty map, with its path, in order."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from walk_leaves(value, (*at, key))
    else:
        yield at, data


def dotted(path: Path) -> str:
    """`("trainer", "tracker", 0, "type")` -> `trainer.tracker[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
