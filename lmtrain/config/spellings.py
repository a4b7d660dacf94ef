"""Aliases and deprecated names of settings, converted to the current names before trees are merged.

Aliases are accepted silently; deprecated names add a notice with the new name. Each tree (a file, an include, the
command line) is converted before merging, so that `--trainer.wandb.name x` applies to a tracker in the file's list.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.replaced import without_replaced_sources
from lmtrain.config.tree import ConfigTree, Origin, Path, dotted, value_at

# section -> other name -> name
SHORT_NAMES = {
    "trainer": {"per_device_train_parallelism": "per_device_parallelism"},
    "lora": {"rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
}
_OLD = {
    "trainer": {"batch_size": "train_batch_size", "eval_per_device_parallelism": "per_device_eval_parallelism"},
}
# Other name -> what to suggest for one like it: a short name is as good as the name, an old one is not.
OTHER_NAMES = {
    f"{section}.{other}": f"{section}.{other}" for section, names in SHORT_NAMES.items() for other in names
} | {f"{section}.{other}": f"{section}.{name}" for section, names in _OLD.items() for other, name in names.items()}
# The families that the reference documents as `model: {gpt2: {...}}`. Newer families never had this form.
_REFERENCE_FAMILIES = ("gpt2", "llama", "mpt", "backpack")


def combine(under: ConfigTree, over: ConfigTree) -> ConfigTree:
    """`over` with current names, merged over `under`. Raises `UserError` if a setting is set under two names."""
    under = _modernise(under, ConfigTree())
    over = _modernise(over, under)
    return without_replaced_sources(under, over).merge(over)


def _modernise(tree: ConfigTree, under: ConfigTree) -> ConfigTree:
    """The tree with current names; `under` is the tree that it will be merged over."""
    tree = tree.copy()
    for section, names in [*SHORT_NAMES.items(), *_OLD.items()]:
        for other, name in names.items():
            place = _rename(tree, (section, other), name)
            if place is not None and names is _OLD.get(section):
                tree.notices.append(f"{place}: {section}.{other} is now called {section}.{name}")
    _unwrap_model(tree)
    for path in _formats(tree):
        _modernise_format(tree, path)
    _wandb_to_tracker(tree, under)
    return tree


def _rename(tree: ConfigTree, old: Path, name: str) -> Origin | None:
    """Rename a setting within its section; returns its origin, None if it is not set."""
    section, new = value_at(tree.data, old[:-1]), (*old[:-1], name)
    if not isinstance(section, dict) or old[-1] not in section:
        return None
    place = tree.origin_of(old)
    if name in section:
        raise UserError(f"{place}: {dotted(old)}: the same as {dotted(new)} at {tree.origin_of(new)}; remove one")
    section[name] = section.pop(old[-1])
    tree.move_origins(old, new)
    return place


def _unwrap_model(tree: ConfigTree) -> None:
    """`model: {gpt2: {...}}` -> `model: {type: gpt2, ...}`."""
    model = tree.data.get("model")
    family = next(iter(model)) if isinstance(model, dict) and len(model) == 1 else None
    if family not in _REFERENCE_FAMILIES or not isinstance(settings := value_at(model, (family,)), dict):
        return
    place = tree.origin_of(("model", family))
    tree.notices.append(f"{place}: 'model: {{{family}: ...}}' is now written 'model: {{type: {family}, ...}}'")
    tree.data["model"] = {"type": family, **settings}
    tree.move_origins(("model", family), ("model",))
    if place is not None:
        tree.origins["model", "type"] = place


def _formats(tree: ConfigTree) -> Iterator[Path]:
    """The paths of the `format` of `data` and of its sources."""
    sources = value_at(tree.data, ("data", "configs"))
    names = sources if isinstance(sources, dict) else {}
    for path in [("data",), *(("data", "configs", name) for name in names)]:
        if isinstance(value_at(tree.data, (*path, "format")), dict):
            yield (*path, "format")


def _modernise_format(tree: ConfigTree, path: Path) -> None:
    """Levanter's `type: supervised` -> completion, and `mask_user_turns` -> loss_on."""
    section = value_at(tree.data, path)
    if section.get("type") == "supervised":
        section["type"] = "completion"
        place = tree.origin_of((*path, "type"))
        tree.notices.append(f"{place}: {dotted((*path, 'type'))}: supervised is now called completion")
    if isinstance(section.get("mask_user_turns"), bool):
        place = _rename(tree, (*path, "mask_user_turns"), "loss_on")
        section["loss_on"] = "assistant" if section["loss_on"] else "all"
        was = dotted((*path, "mask_user_turns"))
        tree.notices.append(f"{place}: {was} is now written {dotted((*path, 'loss_on'))}: {section['loss_on']}")


def _wandb_to_tracker(tree: ConfigTree, under: ConfigTree) -> None:
    """`trainer.wandb` -> the W&B tracker: the existing one, or an additional one."""
    trainer = tree.data.get("trainer")
    if not isinstance(trainer, dict) or "wandb" not in trainer:
        return
    old: Path = ("trainer", "wandb")
    new: Path = ("trainer", "tracker")
    place = tree.origin_of(old)
    if "tracker" in trainer:
        raise UserError(
            f"{place}: trainer.wandb: an older name of trainer.tracker, set at {tree.origin_of(new)}; remove one"
        )
    wandb = trainer.pop("wandb")
    if wandb is not None and not isinstance(wandb, dict):
        raise UserError(f"{place}: trainer.wandb: expected a map of settings; it is now called trainer.tracker")
    tree.notices.append(f"{place}: trainer.wandb is now called trainer.tracker, with type: wandb")
    if wandb is None:
        return
    trackers = deepcopy(value_at(under.data, new))
    listed = isinstance(trackers, list)
    if isinstance(trackers, dict) and not _is_wandb(trackers):
        trackers = [trackers]
    if not isinstance(trackers, list):
        trainer["tracker"] = {"type": "wandb"} | wandb
        tree.move_origins(old, new)
    else:
        below = ConfigTree(None, {path: at for path, at in under.origins.items() if path[: len(new)] == new})
        if not listed:
            below.move_origins(new, (*new, 0))
        tree.origins |= below.origins
        index = next((index for index, entry in enumerate(trackers) if _is_wandb(entry)), len(trackers))
        entry = trackers[index] if index < len(trackers) else {}
        trackers[index : index + 1] = [{"type": "wandb"} | entry | wandb]
        trainer["tracker"] = trackers
        tree.move_origins(old, (*new, index))
    if place is not None:
        tree.origins.setdefault(new, place)


def _is_wandb(tracker: Any) -> bool:
    return isinstance(tracker, dict) and tracker.get("type", "wandb") == "wandb"
