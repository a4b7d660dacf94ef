"""Whether an existing cache matches a config: made by the same recipe from the same sources."""

import os
from collections.abc import Mapping
from typing import Any

from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError

_DIFFERENCES_SHOWN = 10

# A source as in a manifest, see `as_recorded`.
_Source = Mapping[str, Any]


def check_recipe(folder: str, cached: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `UserError` if a cache was built with another tokenizer or other settings."""
    _refuse(folder, describe_differences(cached, wanted, "the cache", "this config"))


def check_sources(folder: str, cached: Mapping[Any, _Source], wanted: Mapping[Any, _Source], complete: bool) -> None:
    """Raise `UserError` if the sources of the shards of a cache, by name or index, are not those of the config.

    Their files may have moved to another folder, and may have another time (`is_touched`). A cache that is not
    `complete` may lack some.
    """
    if all(_is_same(source, wanted.get(shard)) for shard, source in cached.items()) and (
        not complete or len(cached) == len(wanted)
    ):
        return
    before, now = (dict.fromkeys(map(_name, sources.values())) for sources in (cached, wanted))
    changed = [_name(s) for s in cached.values() if not any(_agree(s, other) for other in wanted.values())]
    lines = [f"{name} is in the cache, but no source of this config" for name in before if name not in now]
    lines += [f"{name} has changed since it was cached" for name in changed if name in now]
    if complete:
        lines += [f"{name} is a source of this config, but not in the cache" for name in now if name not in before]
    _refuse(folder, lines or ["the list of sources has another order or length"])


def _is_same(cached: _Source, wanted: _Source | None) -> bool:
    """Whether these are the same source: a file of the same content, or a copy of it in another folder."""
    return wanted is not None and _content(cached) == _content(wanted)


def is_touched(cached: _Source, now: _Source) -> bool:
    """Whether two records of the same source differ only in the time of the file."""
    return cached["url"] == now["url"] and cached.get("modified") != now.get("modified")


def _content(source: _Source) -> dict[str, Any]:
    """A source without its folder and time."""
    return {**_without_time(source), "url": os.path.basename(source["url"])}


def _without_time(source: _Source) -> dict[str, Any]:
    return {**source, "modified": None}


def _agree(cached: _Source, wanted: _Source) -> bool:
    """Whether all is equal that is known of both."""
    return all(cached[name] == wanted[name] for name in cached.keys() & wanted.keys())


def _name(source: _Source) -> str:
    start = source.get("start")
    return source["url"] if start is None else f"{source['url']} from byte {start:,}"


def _refuse(folder: str, differences: list[str]) -> None:
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        shown = differences[:_DIFFERENCES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        report = "\n".join(f"  {line}" for line in shown)
        raise UserError(
            f"{folder}: the cache does not match this config\n{report}\n"
            "  choose another data.cache_dir, or delete this folder to build it again"
        )
