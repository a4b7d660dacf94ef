"""Other names of settings: aliases, deprecated names, those of other systems, and the JSON Schema with all of them.

Aliases are accepted silently; deprecated names add a notice with the new name. Each tree (a file, an include, the
command line) is converted before merging, so that `--trainer.wandb.name x` applies to a tracker in the file's list.
"""

import functools
from collections.abc import Iterator
from copy import deepcopy
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from lmtrain.config.describe import kind_of, sections_of
from lmtrain.config.tree import ConfigTree, Origin, Path, dotted, value_at
from lmtrain.runtime.errors import UserError

# Settings that no longer apply where a tree above them selects something else: another `type`, another text source.
#
# They are removed with a notice, instead of being an error or a second source.

# The settings that name a text source, by kind; a tree that sets one replaces the other kinds below it.
_SOURCES = {"demo": ("demo",), "urls": ("train_urls", "validation_urls"), "id": ("id",), "configs": ("configs",)}
_BELONGS_TO = {"id": ("name", "stream", "split", "validation_split"), "configs": ("train_weights",)}


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


# section -> other name -> name
SHORT_NAMES = {
    "trainer": {"per_device_train_parallelism": "per_device_parallelism"},
    "lora": {"rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
}
_OLD = {"trainer": {"batch_size": "train_batch_size", "eval_per_device_parallelism": "per_device_eval_parallelism"}}
# Settings of the W&B tracker that are now keywords in its `init`.
_OF_INIT = (
    *("notes", "job_type", "dir", "config", "config_exclude_keys", "config_include_keys", "allow_val_change", "force"),
    *("reinit", "resume_from", "fork_from", "tensorboard", "sync_tensorboard", "monitor_gym", "anonymous", "settings"),
)
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
    trackers: Path = ("trainer", "tracker")
    listed = value_at(tree.data, trackers)
    for path in [trackers, *((*trackers, index) for index in range(len(listed) if isinstance(listed, list) else 0))]:
        _keywords_to_init(tree, path, under)
    return tree


def _keywords_to_init(tree: ConfigTree, path: Path, under: ConfigTree) -> None:
    """`notes: x` of the W&B tracker at `path` -> `init: {notes: x}`; null, as earlier versions saved it, is dropped."""
    section, below = value_at(tree.data, path), value_at(under.data, path)
    if not isinstance(section, dict) or not _is_wandb((below if isinstance(below, dict) else {}) | section):
        return
    for name in [name for name in _OF_INIT if name in section]:
        old, new = (*path, name), (*path, "init", name)
        place, value = tree.origin_of(old), section.pop(name)
        if value is None:
            continue
        keywords = section.setdefault("init", {})
        # in a list of trackers, the value of the tree below was copied
        if not isinstance(keywords, dict) or (name in keywords and keywords[name] != value_at(under.data, new)):
            raise UserError(f"{place}: {dotted(old)}: the same as {dotted(new)}; remove one")
        keywords[name] = value
        tree.move_origins(old, new)
        if place is not None:
            tree.origins.setdefault((*path, "init"), place)
        tree.notices.append(f"{place}: {dotted(old)} is now written {dotted(new)}")


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
        raise UserError(f"{place}: trainer.wandb: an older trainer.tracker, set at {tree.origin_of(new)}; remove one")
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


@functools.cache
def other_names(kind: Literal["settings", "switches", "families", "types", "verbs"]) -> dict[str, str]:
    """What to do, the family or the command, by the names of other systems."""
    content = yaml.safe_load(files("lmtrain.config").joinpath("other_names.yaml").read_text(encoding="utf-8"))
    return {name: advice for advice, names in content[kind].items() for name in names}


# Where a section, or a list or map of sections, is allowed, an !include of a file with it is allowed too.
_INCLUDE = {
    "type": "string",
    "pattern": r"\.ya?ml$",
    "description": "With the tag !include: a file with this section; its path is relative to the including file",
}
_MERGE_KEY = {"description": "YAML merge key, lowest priority: an !include, an alias, or a list of them"}


def build_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """JSON Schema, draft 2020-12, with descriptions and defaults. Every section may also be an `!include`."""
    schema = _convert(model.model_json_schema(mode="validation"))
    definitions = schema.get("$defs", {})
    for section, names in SHORT_NAMES.items():
        settings = definitions[_first_ref(schema["properties"][section]).removeprefix("#/$defs/")]["properties"]
        settings |= {short: settings[name] for short, name in names.items()}
    for section in [schema, *definitions.values()]:
        section["properties"]["<<"] = _MERGE_KEY
    schema["$defs"] = {name: {"anyOf": [section, _INCLUDE]} for name, section in definitions.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _first_ref(setting: dict[str, Any]) -> str:
    """The reference to the class of a section, which may be optional."""
    while "$ref" not in setting:
        setting = setting["anyOf"][0]
    return str(setting["$ref"])


def _convert(value: Any) -> Any:
    """Replace `oneOf` by `anyOf`: a section without `type` matches several kinds. Lists and maps may be includes."""
    if isinstance(value, list):
        return [_convert(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {("anyOf" if key == "oneOf" else key): _convert(item) for key, item in value.items()}
    if not any("$ref" in str(value.get(inside)) for inside in ("items", "additionalProperties", "patternProperties")):
        return converted
    about = {key: converted[key] for key in ("description", "default", "title") if key in converted}
    return about | {"anyOf": [converted, _INCLUDE]}
