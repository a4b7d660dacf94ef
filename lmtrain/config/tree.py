"""A tree of settings: plain data, and the origin (file and line, or flag) of every value; differences of two trees.

The settings of a run are trees merged in order: included files, the config file, the command line. Maps are merged
key by key, everything else is replaced, and a value keeps its origin.
"""

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a file and its line (counted from 1), or a command-line flag (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        source = redact(self.source)
        return source if self.line is None else f"{source}:{self.line}"


@dataclass
class ConfigTree:
    """Data as loaded from YAML (maps, lists, scalars), and in `origins` an entry for every map entry and list item.

    `notices` are messages for the user, one line each.
    """

    data: Any = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def origin_of(self, path: Path) -> Origin | None:
        """The origin of `path`, or of the nearest enclosing value that has one."""
        ends = range(len(path), 0, -1)
        return next((self.origins[path[:end]] for end in ends if path[:end] in self.origins), None)

    def copy(self) -> "ConfigTree":
        return ConfigTree(deepcopy(self.data), dict(self.origins), list(self.notices))

    def remove(self, path: Path) -> None:
        """Remove a value, with the origins of everything in it."""
        del value_at(self.data, path[:-1])[path[-1]]
        self._forget({path})

    def move_origins(self, old: Path, new: Path) -> None:
        """Let the origins of the value at `old` be those of the value at `new`."""
        for path in [path for path in self.origins if path[: len(old)] == old]:
            self.origins[(*new, *path[len(old) :])] = self.origins.pop(path)

    def merge(self, over: "ConfigTree") -> "ConfigTree":
        """This tree with the other one over it: maps are merged recursively, lists and scalars are replaced."""
        merged = self.copy()
        replaced: set[Path] = set()
        _merge(merged.data, over.data, (), replaced)
        merged._forget(replaced)
        merged.origins |= over.origins
        merged.notices += over.notices
        return merged

    def _forget(self, replaced: Collection[Path]) -> None:
        """Remove the origins of these values, and of everything in them."""
        if replaced:
            self.origins = {
                path: origin
                for path, origin in self.origins.items()
                if not any(path[:end] in replaced for end in range(1, len(path) + 1))
            }


def _merge(below: dict[str, Any], above: dict[str, Any], at: Path, replaced: set[Path]) -> None:
    """Merge `above` into `below`, which are at `at`, and collect the paths of the values that it replaces."""
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value, (*at, key), replaced)
        else:
            if key in below:
                replaced.add((*at, key))
            below[key] = value


def lift(tree: ConfigTree, at: Path) -> ConfigTree:
    """The tree with its data nested at the path `at`. Its origins already have paths from the root."""
    data: Any = tree.data
    for part in reversed(at):
        data = {part: data}
    return ConfigTree(data, tree.origins, tree.notices)


def value_at(data: Any, path: Path) -> Any:
    """The value at `path`; None if there is none."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


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


# The text of a value that a tree omits: by the tree, and the path of the value.
Omitted = Callable[[Any, Path], str]


def describe_differences(
    before: Any, now: Any, before_name: str, now_name: str, omitted: Omitted = lambda tree, path: "nothing"
) -> list[str]:
    """One line for each leaf that differs: `tokenizer.vocab_size: the cache has 8192, this run has 50257`.

    Secrets are not compared.
    """
    if before == now:  # most often, and masking takes milliseconds
        return []
    old, new = dict(walk_leaves(redact(before))), dict(walk_leaves(redact(now)))
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            sides = ((old, before), (new, now))
            texts = [_short(repr(leaves[path]) if path in leaves else omitted(tree, path)) for leaves, tree in sides]
            lines.append(f"{dotted(path)}: {before_name} has {texts[0]}, {now_name} has {texts[1]}")
    return lines


def require_equal(
    saved: Any, now: Any, problem: str, advice: str = "", omitted: Omitted = lambda tree, path: "nothing"
) -> None:
    """Raise `UserError` with the `problem`, each difference of a checkpoint from this config, and advice, if any."""
    lines = describe_differences(saved, now, "the checkpoint", "this config", omitted)
    if lines:
        raise UserError("\n  ".join([problem, *lines, *([advice] if advice else [])]))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
