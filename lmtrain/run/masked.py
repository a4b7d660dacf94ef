"""Secrets of a config that was saved without them: from the environment, or from the config that the run was started
with."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

from lmtrain.config.errors import UserError
from lmtrain.config.load import LoadedConfig
from lmtrain.config.redact import find_masked, redact, redact_as_before
from lmtrain.config.tree import Path, dotted, value_at
from lmtrain.run.config import RunConfig

_TRACKERS = ("trainer", "tracker")
_TEXT = ("train_urls", "validation_urls")
# Settings that only training uses.
_OF_TRAINING = {
    *(_TRACKERS, ("trainer", "initialize_from"), ("trainer", "load_checkpoint_path")),
    *(("lora", "initialize_from"), ("hf_save_path",)),
}


def fill_masked(
    loaded: LoadedConfig[RunConfig], given: RunConfig | None = None, environment: Mapping[str, str] = os.environ
) -> LoadedConfig[RunConfig]:
    """The config with masked values replaced where their secrets are known; others stay masked.

    A setting of W&B is removed if its environment variable is set, such as WANDB_API_KEY, which W&B reads itself. Other
    secrets are those of the same settings in `given`.
    """
    masked = find_masked(loaded.tree.data)
    if not masked:
        return loaded
    data = deepcopy(loaded.tree.data)
    values = {} if given is None else given.model_dump(mode="json")
    forms = redact(values)
    for path in masked:
        form = value_at(forms, path)
        if form is not None and value_at(data, path) in (form, redact_as_before(form)):
            value_at(data, path[:-1])[path[-1]] = value_at(values, path)
        elif _variable(path) in environment:
            del value_at(data, path[:-1])[path[-1]]
    return replace(loaded, config=RunConfig.model_validate(data), tree=replace(loaded.tree, data=data))


def require_secrets(loaded: LoadedConfig[RunConfig], trains: bool = False) -> None:
    """Raise `UserError` if values are masked that a command uses, which trains or does not.

    URLs of text are checked when text is read, as a finished cache does not need them.
    """
    masked = [
        path
        for path in find_masked(loaded.config.model_dump(mode="json"))
        if (trains or path[:2] not in _OF_TRAINING) and not (path[0] == "data" and set(_TEXT).intersection(path))
    ]
    if masked:
        lines = [f"  {dotted(path)}" + (f": set {name}" if (name := _variable(path)) else "") for path in masked]
        raise UserError(
            f"{loaded.path}: secrets are masked, since they are not saved with a run\n" + "\n".join(lines) + "\n  "
            "use the config that the run was started with (after --run ID, add it as CONFIG)"
        )


def _variable(path: Path) -> str:
    """The environment variable of a setting of W&B; empty for other settings."""
    is_setting = path[:2] == _TRACKERS and len(path) > 3 and path[-2] == "settings"
    return f"WANDB_{str(path[-1]).upper()}" if is_setting else ""
