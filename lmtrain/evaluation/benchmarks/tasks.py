"""The tasks of a run: found, checked and loaded by lm-eval."""

import contextlib
import difflib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.api.task
import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from lmtrain.evaluation.benchmarks.config import BenchmarkTask, EvalHarnessConfig
from lmtrain.hf.hub import offline_reason
from lmtrain.runtime.errors import UserError, counted

_SUGGESTIONS = 3
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
    manager, tasks = find_tasks(config)
    loaded: list[Any] = []
    names: dict[str, str] = {}
    for name, spec in tasks:
        if not config.confirm_run_unsafe_code:
            _refuse_code(manager, name)
        members = _load(manager, name, spec, config)
        if spec.task_alias is not None:
            names |= dict.fromkeys((task.task_name for task in members), spec.task_alias)
        loaded += members
    return manager.load(loaded), names


def find_tasks(config: EvalHarnessConfig) -> tuple[TaskManager, list[tuple[str, BenchmarkTask]]]:
    """lm-eval's index of tasks, and the tasks of `config.task_spec` by name, with their settings.

    Raises `UserError` with all names that lm-eval does not have.
    """
    specs = [BenchmarkTask(task=spec) if isinstance(spec, str) else spec for spec in config.task_spec]
    folder = None if config.include_path is None else os.path.expanduser(config.include_path)
    if folder is not None and not os.path.isdir(folder):
        raise UserError(f"eval_harness.include_path: {config.include_path}: no such folder")
    manager = _manager(folder, tuple(spec.task for spec in specs))
    tasks = {spec.task: _names(manager, spec.task) for spec in specs}
    unknown = [task for task, names in tasks.items() if not names]
    if unknown:
        near = {task: difflib.get_close_matches(task, manager.all_tasks, _SUGGESTIONS) for task in unknown}
        listed = "\n".join(
            f"  {task}" + (f"; did you mean {' or '.join(near[task])}?" if near[task] else "") for task in unknown
        )
        raise UserError(
            f"eval_harness.task_spec: lm-eval has no such task:\n{listed}\n  a task of your own requires include_path, "
            "the folder of its YAML file"
        )
    return manager, [(name, spec) for spec in specs for name in tasks[spec.task]]


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


def _manager(folder: str | None, names: tuple[str, ...]) -> TaskManager:
    """An index of tasks. That of lm-eval's own 10,000 files takes seconds, so it is read once, and only if needed."""
    others = [name for name in names if not os.path.isfile(os.path.expanduser(name))]
    if folder is not None or not others:
        alone = TaskManager(include_path=folder, include_defaults=False)
        if all(name in alone.task_index for name in others):
            return alone
    return _index_of_all(folder)


@functools.lru_cache(1)
def _index_of_all(folder: str | None) -> TaskManager:
    return TaskManager(include_path=folder)


def _names(manager: TaskManager, name: str) -> list[str]:
    """The task itself, or those that a pattern with * matches; empty if there is none."""
    path = os.path.expanduser(name)
    if name in manager.task_index:
        return [name]
    if os.path.isfile(path):
        return [path]
    matching: list[str] = manager.match_tasks([name]) if "*" in name else []
    return matching


def _load(manager: TaskManager, name: str, spec: BenchmarkTask, config: EvalHarnessConfig) -> list[Any]:
    """A task, the tasks of a tag, or a group, with the settings of `spec` and `config`."""
    import datasets

    wanted = {"task": name, **spec.changes} if spec.changes else name
    try:
        with quiet():
            task_dict = manager.load([wanted])
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = offline_reason() or str(error).splitlines()[0]
        raise UserError(
            f"eval_harness.task_spec: the data of {name} is not available: {reason}\n"
            "  offline, use tasks with local data (include_path), or set HF_HOME to a copy of the cache of a machine "
            "where this command ran with a network; a gated dataset requires HF_TOKEN"
        ) from None
    except (ValueError, KeyError, TypeError, ImportError, AttributeError, OSError) as error:
        raise UserError(f"eval_harness.task_spec: {name} cannot be loaded: {type(error).__name__}: {error}") from None
    if spec.task_alias is not None and len(task_dict["tasks"]) != 1:
        raise UserError(
            f"eval_harness.task_spec: task_alias of {name}, which has {counted(len(task_dict['tasks']), 'task')}; "
            "remove it"
        )
    for task in task_dict["tasks"].values():
        shots = config.num_fewshot if spec.num_fewshot is None else spec.num_fewshot
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    inside = {task for group in task_dict["groups"].values() for task in group.get_all_tasks()}
    children = {name for group in task_dict.get("group_map", {}).values() for name in group}
    tops = [group for name, group in task_dict["groups"].items() if name not in children]
    return [*tops, *(task for task in task_dict["tasks"].values() if task not in inside)]


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


class BenchmarkItem(NamedTuple):
    """An item of a task: its number among those that are evaluated, and the question with each answer."""

    task: str
    number: int
    texts: tuple[str, ...]


def load_items(config: EvalHarnessConfig) -> Iterator[BenchmarkItem]:
    """All items of the tasks. Raises `UserError` as `load_tasks` does."""
    tasks, _ = load_tasks(config)
    for name, task in tasks["tasks"].items():
        with quiet():
            documents = task.eval_docs
        for number, document in enumerate(documents):
            yield BenchmarkItem(name, number, _texts(task, document))


def _texts(task: Any, document: Any) -> tuple[str, ...]:
    """The question with each choice, or with the answer; of tasks whose questions differ, each with the answer."""
    question, answer = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if getattr(task.config, "doc_to_choice", None) is not None else []
    if isinstance(question, int):
        return tuple(f"{choice} {answer}" for choice in choices)
    answers = choices or (answer if isinstance(answer, list) else [answer])
    return tuple(f"{question} {answer}" for answer in answers if isinstance(answer, str)) or (str(question),)
