"""The tasks of a run: found, checked and loaded by lm-eval."""

import contextlib
import difflib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name
from lmtrain.evaluation.benchmarks.config import BenchmarkTask, EvalHarnessConfig
from lmtrain.hf.hub import prepare_hub

# The seed of lm-eval's command for the choice of examples.
_FEWSHOT_SEED = 1234
_INSTALLED = Path(lm_eval.tasks.__file__).parent


class _Loader(yaml.SafeLoader):
    """Reads tasks without their functions."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def load_tasks(config: EvalHarnessConfig) -> tuple[TaskDict, dict[str, str]]:
    """The tasks of `config.task_spec` with their data, as lm-eval's `evaluate` takes them, and names for metrics.

    Raises `UserError` for unknown tasks, for data that is not available, and for tasks that run code of their own
    unless the config allows it.
    """
    prepare_hub()
    specs = [BenchmarkTask(task=spec) if isinstance(spec, str) else spec for spec in config.task_spec]
    if config.include_path is not None and not os.path.isdir(os.path.expanduser(config.include_path)):
        raise UserError(f"eval_harness.include_path: {config.include_path}: no such folder")
    manager = _manager(config, specs)
    loaded: list[Any] = []
    names: dict[str, str] = {}
    for spec in specs:
        for name in _names(manager, spec.task):
            if not config.confirm_run_unsafe_code:
                _refuse_code(manager, name)
            found = _load(manager, name, spec, config)
            if spec.task_alias is not None:
                names |= dict.fromkeys((one.task_name for one in found), spec.task_alias)
            loaded += found
    return manager.load(loaded), names


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars of lm-eval and datasets, which would break the lines of a log."""
    import datasets

    before, shown = lm_eval.api.task.tqdm, datasets.are_progress_bars_disabled()
    lm_eval.api.task.tqdm = functools.partial(before, disable=True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = before
        if not shown:
            datasets.enable_progress_bars()


def _manager(config: EvalHarnessConfig, specs: list[BenchmarkTask]) -> TaskManager:
    """An index of tasks. That of lm-eval's own 10,000 files takes seconds, so it is read only if needed."""
    folder = None if config.include_path is None else os.path.expanduser(config.include_path)
    if folder is not None or all(os.path.isfile(os.path.expanduser(spec.task)) for spec in specs):
        alone = TaskManager(include_path=folder, include_defaults=False)
        if all(spec.task in alone.task_index or os.path.isfile(os.path.expanduser(spec.task)) for spec in specs):
            return alone
    return TaskManager(include_path=folder)


def _names(manager: TaskManager, name: str) -> list[str]:
    """The task itself, or those that a pattern with * matches."""
    path = os.path.expanduser(name)
    if name in manager.task_index:
        return [name]
    if os.path.isfile(path):
        return [path]
    found: list[str] = manager.match_tasks([name]) if "*" in name else []
    if not found:
        near = suggest_name(name, manager.all_tasks) or next(
            iter(difflib.get_close_matches(name, manager.all_tasks, 1)), None
        )
        hint = f"did you mean {near}? " if near else ""
        raise UserError(
            f"eval_harness.task_spec: lm-eval has no task {name!r}; {hint}a task of your own needs include_path, the "
            "folder of its YAML file"
        )
    return found


def _load(manager: TaskManager, name: str, spec: BenchmarkTask, config: EvalHarnessConfig) -> list[Any]:
    """A task, the tasks of a tag, or a group, with the settings of `spec` and `config`."""
    import datasets

    wanted = {"task": name, **spec.changes} if spec.changes else name
    try:
        with quiet():
            found = manager.load([wanted])
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        raise UserError(
            f"eval_harness.task_spec: the data of {name} is not available: {str(error).splitlines()[0]}\n"
            "  offline, use tasks with local data (include_path), or download the data with HF_HUB_OFFLINE=0 first; a "
            "gated dataset requires HF_TOKEN"
        ) from None
    except (ValueError, KeyError, TypeError, ImportError, AttributeError, OSError) as error:
        raise UserError(f"eval_harness.task_spec: {name} cannot be loaded: {type(error).__name__}: {error}") from None
    if spec.task_alias is not None and len(found["tasks"]) != 1:
        raise UserError(
            f"eval_harness.task_spec: task_alias of {name}, which has {len(found['tasks'])} tasks; remove it"
        )
    for task in found["tasks"].values():
        shots = config.num_fewshot if spec.num_fewshot is None else spec.num_fewshot
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    inside = {task for group in found["groups"].values() for task in group.get_all_tasks()}
    tops = [group for name, group in found["groups"].items() if not _is_child(name, found)]
    return [*tops, *(task for task in found["tasks"].values() if task not in inside)]


def _is_child(name: str, found: TaskDict) -> bool:
    return any(name in children for children in found.get("group_map", {}).values())


def _refuse_code(manager: TaskManager, name: str) -> None:
    """Raise `UserError` if a task from outside lm-eval runs Python code."""
    for path in _files(manager, name, set()):
        if path.is_relative_to(_INSTALLED):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if "!function" in line or line.startswith(("class:", "class :")):
                raise UserError(
                    f"{path}:{number}: the task {name} runs Python code ({line.strip()}); add "
                    "--confirm_run_unsafe_code (eval_harness.confirm_run_unsafe_code: true) if you trust it"
                )


def _files(manager: TaskManager, name: str, seen: set[str]) -> Iterator[Path]:
    """The YAML files of a task, of the tasks of a group or tag, and of what they include."""
    if name in seen:
        return
    seen.add(name)
    entry = manager.task_index.get(name)
    waiting = [Path(name).expanduser().resolve()] if entry is None else []
    if entry is not None:
        waiting += [entry.yaml_path] if entry.yaml_path is not None else []
        members = list(entry.tags) if entry.yaml_path is None else (entry.cfg or {}).get("task", [])
        for member in members if isinstance(members, list) else []:
            inner = member.get("task") or member.get("group") if isinstance(member, dict) else member
            if isinstance(inner, str) and inner in manager.task_index:
                yield from _files(manager, inner, seen)
    while waiting:
        path = waiting.pop()
        if not path.is_file():
            continue
        yield path
        included = yaml.load(path.read_text(), Loader=_Loader).get("include", [])
        waiting += [path.parent / file for file in ([included] if isinstance(included, str) else included)]
