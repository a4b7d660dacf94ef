"""Custom trackers: a class given by its import path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name
from lmtrain.tracking.tracker import Tracker

_VERBS = ("hyperparameters", "log", "summary", "artifact", "finish")


def import_custom(path: str) -> Callable[..., Tracker]:
    """The class `package.module.Class`, from the installed packages or the current folder.

    Raises `UserError` if it cannot be imported, or lacks methods of a tracker.
    """
    module_name, _, class_name = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:  # the current folder is not on the path of an installed command
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any error of the user's code
        raise UserError(
            f"trainer.tracker: {module_name} cannot be imported: {type(error).__name__}: {error}; it has to be in the "
            "current folder, on PYTHONPATH or installed"
        ) from error
    custom = getattr(module, class_name, None)
    if custom is None:
        hint = suggest_name(class_name, dir(module))
        advice = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"trainer.tracker: {getattr(module, '__file__', module_name)} has no {class_name!r}{advice}")
    missing = [verb for verb in _VERBS if not callable(getattr(custom, verb, None))]
    if missing:
        raise UserError(f"trainer.tracker: {path} is not a tracker: missing methods {', '.join(missing)}")
    tracker: Callable[..., Tracker] = custom
    return tracker


def check_arguments(path: str, custom: Callable[..., Tracker], arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` if the class does not accept the arguments that it will be called with."""
    given = {"run": "", "folder": "", "step": 0}
    try:
        twice = sorted(given.keys() & arguments.keys())
        if twice:
            raise TypeError(f"{', '.join(twice)} is set by lmtrain")
        inspect.signature(custom).bind(**given, **arguments)
    except TypeError as error:
        raise UserError(
            f"trainer.tracker: {path} is called with run, folder, step and trainer.tracker.arguments: {error}"
        ) from None
    except ValueError:  # the class has no signature that can be inspected
        return
