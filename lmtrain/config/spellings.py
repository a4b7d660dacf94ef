"""Aliases and deprecated names of settings, converted to the current names before layers are merged.

Aliases are accepted silently; deprecated names add a notice with the new name. Each layer (a file, an include, the
command line) is converted before merging, so that `--trainer.wandb.name x` applies to a tracker in the file's list.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer, Path, dotted, merge

# section -> other name -> name
SHORT_NAMES = {
    "trainer": {"per_device_train_parallelism": "per_device_parallelism"},
    "lora": {"rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
}
_OLD = {
    "trainer": {"batch_size": "train_batch_size", "eval_per_device_parallelism": "per_device_eval_parallelism"},
}
# The families that the reference documents as `model: {gpt2: {...}}`. Newer families never had this form.
_REFERENCE_FAMILIES = ("gpt2", "llama", "mpt", "backpack")

# The settings that name a text source, by kind; a layer that sets one replaces the other kinds of lower layers.
_SOURCES = {
    "demo": ("demo",),
    "urls": ("train_urls", "validation_urls"),
    "id": ("id",),
    "configs": ("configs",),
}
_BELONGS_TO = {"id": ("name", "stream"), "configs": ("train_weights",)}


def combine(under: Layer, over: Layer) -> Layer:
    """`over` with current names, merged over `under`. Raises `UserError` if a setting is set under two names."""
    under = _modernise(under, Layer())
    over = _modernise(over, under)
    return merge(_without_replaced_sources(under, over), over)


def _modernise(layer: Layer, under: Layer) -> Layer:
    """The layer with current names; `under` is the layer that it will be merged over."""
    layer = Layer(deepcopy(layer.data), dict(layer.origins), list(layer.notices))
    for renames, is_old in ((SHORT_NAMES, False), (_OLD, True)):
        for section, names in renames.items():
            for other, name in names.items():
                _rename(layer, (section, other), (section, name), is_old)
    _unwrap_model(layer)
    for path in _formats(layer):
        _modernise_format(layer, path)
    _wandb_to_tracker(layer, under)
    return layer


def _rename(layer: Layer, old: Path, new: Path, is_old: bool) -> None:
    section = layer.data.get(str(old[0]))
    if not isinstance(section, dict) or old[1] not in section:
        return
    place = layer.origin_of(old)
    if new[1] in section:
        raise UserError(f"{place}: {dotted(old)}: the same as {dotted(new)} at {layer.origin_of(new)}; remove one")
    if is_old:
        layer.notices.append(f"{place}: {dotted(old)} is now called {dotted(new)}")
    section[new[1]] = section.pop(old[1])
    _move_origins(layer, old, new)


def _unwrap_model(layer: Layer) -> None:
    """`model: {gpt2: {...}}` -> `model: {type: gpt2, ...}`."""
    model = layer.data.get("model")
    family = next(iter(model)) if isinstance(model, dict) and len(model) == 1 else None
    if not isinstance(model, dict) or family not in _REFERENCE_FAMILIES or not isinstance(model[family], dict):
        return
    place = layer.origin_of(("model", family))
    layer.notices.append(f"{place}: 'model: {{{family}: ...}}' is now written 'model: {{type: {family}, ...}}'")
    layer.data["model"] = {"type": family, **model[family]}
    _move_origins(layer, ("model", family), ("model",))
    if place is not None:
        layer.origins["model", "type"] = place


def _formats(layer: Layer) -> Iterator[Path]:
    """The paths of the `format` of `data` and of its sources."""
    data = layer.data.get("data")
    if not isinstance(data, dict):
        return
    sources: dict[Path, Any] = {("data",): data}
    if isinstance(data.get("configs"), dict):
        sources |= {("data", "configs", name): source for name, source in data["configs"].items()}
    for path, source in sources.items():
        if isinstance(source, dict) and isinstance(source.get("format"), dict):
            yield (*path, "format")


def _modernise_format(layer: Layer, path: Path) -> None:
    """Levanter's `type: supervised` -> completion, and `mask_user_turns` -> loss_on."""
    section: Any = layer.data
    for part in path:
        section = section[part]
    if section.get("type") == "supervised":
        section["type"] = "completion"
        place = layer.origin_of((*path, "type"))
        layer.notices.append(f"{place}: {dotted((*path, 'type'))}: supervised is now called completion")
    if "mask_user_turns" in section and isinstance(section["mask_user_turns"], bool):
        old, new = (*path, "mask_user_turns"), (*path, "loss_on")
        place = layer.origin_of(old)
        if "loss_on" in section:
            raise UserError(f"{place}: {dotted(old)}: the same as {dotted(new)} at {layer.origin_of(new)}; remove one")
        section["loss_on"] = "assistant" if section.pop("mask_user_turns") else "all"
        layer.notices.append(f"{place}: {dotted(old)} is now written {dotted(new)}: {section['loss_on']}")
        _move_origins(layer, old, new)


def _wandb_to_tracker(layer: Layer, under: Layer) -> None:
    """`trainer.wandb` -> the W&B tracker: the existing one, or an additional one."""
    trainer = layer.data.get("trainer")
    if not isinstance(trainer, dict) or "wandb" not in trainer:
        return
    old: Path = ("trainer", "wandb")
    place = layer.origin_of(old)
    if "tracker" in trainer:
        other = layer.origin_of(("trainer", "tracker"))
        raise UserError(f"{place}: trainer.wandb: an older name of trainer.tracker, set at {other}; remove one")
    wandb = trainer["wandb"]
    if wandb is not None and not isinstance(wandb, dict):
        raise UserError(f"{place}: trainer.wandb: expected a map of settings; it is now called trainer.tracker")
    layer.notices.append(f"{place}: trainer.wandb is now called trainer.tracker, with type: wandb")
    del trainer["wandb"]
    if wandb is None:
        return
    below: Any = under.data.get("trainer")
    there = below.get("tracker") if isinstance(below, dict) else None
    if isinstance(there, dict) and there.get("type", "wandb") != "wandb":
        there = [there]
        _copy_origins(under, ("trainer", "tracker"), layer, ("trainer", "tracker", 0))
    elif isinstance(there, list):
        _copy_origins(under, ("trainer", "tracker"), layer, ("trainer", "tracker"))
    if isinstance(there, list):
        is_wandb = [isinstance(entry, dict) and entry.get("type", "wandb") == "wandb" for entry in there]
        index = is_wandb.index(True) if True in is_wandb else len(there)
        entry = deepcopy(there[index]) if index < len(there) else {}
        entry = {"type": "wandb"} | entry | (wandb or {})
        trainer["tracker"] = [*deepcopy(there[:index]), entry, *deepcopy(there[index + 1 :])]
        _move_origins(layer, old, ("trainer", "tracker", index))
    else:
        trainer["tracker"] = {"type": "wandb"} | (wandb or {})
        _move_origins(layer, old, ("trainer", "tracker"))
    if place is not None:
        layer.origins.setdefault(("trainer", "tracker"), place)


def _without_replaced_sources(under: Layer, over: Layer) -> Layer:
    """`under` without the text sources of other kinds than the one in `over`, with a notice for each."""
    below, above = under.data.get("data"), over.data.get("data")
    if not isinstance(below, dict) or not isinstance(above, dict):
        return under
    named = [kind for kind, settings in _SOURCES.items() if any(above.get(name) for name in settings)]
    if not named:
        return under
    replaced = [name for kind, names in _SOURCES.items() if kind not in named for name in names]
    # settings that belong to a source are removed with it; another id is another dataset, while maps of configs merge
    replaced += [name for kind, names in _BELONGS_TO.items() if kind not in named or kind == "id" for name in names]
    gone = [name for name in replaced if below.get(name) and name not in above]
    if not gone:
        return under
    left = Layer(deepcopy(under.data), dict(under.origins), list(under.notices))
    by = next(over.origin_of(("data", name)) for kind in named for name in _SOURCES[kind] if above.get(name))
    for name in gone:
        left.notices.append(f"{by}: replaces data.{name} of {under.origin_of(('data', name))}")
        del left.data["data"][name]
        for stale in [path for path in left.origins if path[:2] == ("data", name)]:
            del left.origins[stale]
    return left


def _move_origins(layer: Layer, old: Path, new: Path) -> None:
    for path in [path for path in layer.origins if path[: len(old)] == old]:
        layer.origins[(*new, *path[len(old) :])] = layer.origins.pop(path)


def _copy_origins(source: Layer, old: Path, target: Layer, new: Path) -> None:
    for path, origin in source.origins.items():
        if path[: len(old)] == old:
            target.origins[(*new, *path[len(old) :])] = origin
