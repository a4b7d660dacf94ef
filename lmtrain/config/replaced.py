"""Settings that no longer apply where a tree above them selects something else: another `type`, another text source.

They are removed with a notice, instead of being an error or a second source.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from lmtrain.config.describe import kind_of, sections_of
from lmtrain.config.tree import ConfigTree, Path, dotted, value_at

# The settings that name a text source, by kind; a tree that sets one replaces the other kinds below it.
_SOURCES = {
    "demo": ("demo",),
    "urls": ("train_urls", "validation_urls"),
    "id": ("id",),
    "configs": ("configs",),
}
_BELONGS_TO = {"id": ("name", "stream"), "configs": ("train_weights",)}


def without_replaced_sources(under: ConfigTree, over: ConfigTree) -> ConfigTree:
    """`under` without the text sources of other kinds than the one in `over`."""
    below, above = under.data.get("data"), over.data.get("data")
    if not isinstance(below, dict) or not isinstance(above, dict):
        return under
    named = [kind for kind, settings in _SOURCES.items() if any(above.get(name) for name in settings)]
    if not named:
        return under
    replaced = [name for kind, names in _SOURCES.items() if kind not in named for name in names]
    # settings that belong to a source are removed with it; another id is another dataset, while maps of configs merge
    replaced += [name for kind, names in _BELONGS_TO.items() if kind not in named or kind == "id" for name in names]
    by = next(over.origin_of(("data", name)) for kind in named for name in _SOURCES[kind] if above.get(name))
    left = under.copy()
    for name in replaced:
        if below.get(name) and name not in above:
            left.notices.append(f"{by}: replaces data.{name} of {under.origin_of(('data', name))}")
            left.remove(("data", name))
    return left


def without_settings_of_other_types(model: type[BaseModel], under: ConfigTree, over: ConfigTree) -> ConfigTree:
    """`under` without the settings that do not exist in the `type` of a section that `over` selects.

    With `--trainer.tracker.type json` over a W&B tracker, the setting `project` is removed.
    """
    left = under.copy()
    for path, section in _changed_types(model, under, over, ()):
        kind, by = section.model_fields["type"].default, over.origin_of((*path, "type"))
        for name in value_at(under.data, path):
            if name not in section.model_fields:
                setting = (*path, name)
                place = under.origin_of(setting)
                left.notices.append(f"{by}: ignoring {dotted(setting)} ({place}): {kind} has no such setting")
                left.remove(setting)
    return left


def _changed_types(
    model: type[BaseModel], under: ConfigTree, over: ConfigTree, at: Path
) -> Iterator[tuple[Path, type[BaseModel]]]:
    """The paths of sections whose `type` is changed, each with its new class."""
    for name, field in model.model_fields.items():
        path = (*at, name)
        below, above = value_at(under.data, path), value_at(over.data, path)
        if not isinstance(below, dict) or not isinstance(above, dict):
            continue
        kinds = {kind_of(section): section for section in sections_of(field.annotation)}
        kind = above.get("type")
        if len(kinds) > 1 and isinstance(kind, str) and kind in kinds and kind != below.get("type", next(iter(kinds))):
            yield path, kinds[kind]
        elif len(kinds) == 1:
            yield from _changed_types(next(iter(kinds.values())), under, over, path)
