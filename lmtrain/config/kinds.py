"""Changing the `type` of a section on the command line: settings that the new type does not have are dropped."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from lmtrain.config.describe import sections_of
from lmtrain.config.layers import Layer, Path, dotted


def without_foreign(model: type[BaseModel], under: Layer, over: Layer) -> Layer:
    """`under`, without the settings that no longer exist where `over` changes the `type`; each gets a notice.

    With `--trainer.tracker.type json` over a W&B tracker, the setting `project` is dropped instead of being an error.
    """
    result = under
    for path, kind in _changed_kinds(model, under.data, over.data, ()):
        below = _at(under.data, path)
        for name in [name for name in below if name not in kind.model_fields]:
            if result is under:
                result = Layer(deepcopy(under.data), dict(under.origins), list(under.notices))
            type_name = kind.model_fields["type"].default
            place, by = under.origin_of((*path, name)), over.origin_of((*path, "type"))
            result.notices.append(f"{by}: ignoring {dotted((*path, name))} ({place}): {type_name} has no such setting")
            del _at(result.data, path)[name]
            for stale in [p for p in result.origins if p[: len(path) + 1] == (*path, name)]:
                del result.origins[stale]
    return result


def _changed_kinds(model: type[BaseModel], under: Any, over: Any, at: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        below, above = under.get(name), over.get(name)
        if not isinstance(below, dict) or not isinstance(above, dict):
            continue
        sections = sections_of(field.annotation)
        kinds = {
            section.model_fields["type"].default: section for section in sections if "type" in section.model_fields
        }
        if len(kinds) > 1:
            default = next(iter(kinds))
            kind = above.get("type")
            if isinstance(kind, str) and kind in kinds and kind != below.get("type", default):
                yield (*at, name), kinds[kind]
        else:
            for section in sections[:1]:
                yield from _changed_kinds(section, below, above, (*at, name))


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data
