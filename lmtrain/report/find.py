"""Finds the files of a run that the user names by metrics file, by log folder or by id."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name

_ENDING = ".metrics.jsonl"
_MAX_LISTED = 20


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. `metrics` exists; `folder`, with the config and the goodput ledger, may be missing."""

    id: str
    metrics: str
    folder: str


def find_run(name: str, log_dir: str) -> RunFiles:
    """The run called `name`: a metrics.jsonl, `<log_dir>/<run_id>`, a run id, or a unique prefix of one.

    Raises `UserError` with the existing runs.
    """
    if "://" in name:
        raise UserError(
            f"{name}: reports read local files only; copy <run_id>{_ENDING} and <run_id>/ to this machine first"
        )
    log_dir = os.path.expanduser(log_dir)
    base = os.path.expanduser(name).rstrip("/") or name
    for path in (base, f"{base}{_ENDING}", f"{os.path.abspath(base)}{_ENDING}", os.path.join(log_dir, base + _ENDING)):
        if os.path.isfile(path):
            return _files(path)
    folder = os.path.dirname(base) or log_dir
    matching = [run for run in _ids(folder) if run.startswith(os.path.basename(base))]
    if len(matching) == 1:
        return _files(os.path.join(folder, matching[0] + _ENDING))
    if matching and os.path.basename(base):
        raise UserError(f"{name} is ambiguous: {', '.join(matching[:_MAX_LISTED])}")
    raise UserError(_unknown(name, base, log_dir))


def find_runs(names: Sequence[str], log_dir: str) -> list[RunFiles]:
    """All runs in the order of their names. Raises `UserError` for a run that is named twice."""
    runs = [find_run(name, log_dir) for name in names]
    seen: dict[str, str] = {}
    for name, files in zip(names, runs, strict=True):
        path = os.path.realpath(files.metrics)
        if path in seen:
            raise UserError(f"{seen[path]} and {name} are the same run: {files.metrics}")
        seen[path] = name
    return runs


def name_runs(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its id, and for runs with the same id the part of the path in which they differ."""
    names = []
    for run in runs:
        folders = [os.path.dirname(os.path.abspath(other.metrics)) for other in runs if other.id == run.id]
        folder = os.path.dirname(os.path.abspath(run.metrics))
        # logs in one folder differ in the ending of their names
        where = os.path.relpath(folder, os.path.commonpath(folders)) if folders.count(folder) == 1 else run.metrics
        names.append(run.id if len(folders) == 1 else f"{run.id} ({where})")
    return names


def _files(metrics: str) -> RunFiles:
    name = os.path.basename(metrics)
    run = name.removesuffix(_ENDING) if name.endswith(_ENDING) else os.path.splitext(name)[0]
    return RunFiles(run, metrics, os.path.join(os.path.dirname(metrics), run))


def _unknown(name: str, base: str, log_dir: str) -> str:
    """The message for an unknown run, with the runs of the folder that was named or that contains the named run."""
    folder = base if os.path.isdir(base) and _ids(base) else os.path.dirname(base) or log_dir
    ids = _ids(folder)
    if not ids:
        return f"run {name} not found: no {base}{_ENDING}, and no *{_ENDING} in {folder}; --log_dir sets the folder"
    last = os.path.basename(base).removesuffix(_ENDING)
    hint = suggest_name(last, ids)
    more = f", and {len(ids) - _MAX_LISTED} more" if len(ids) > _MAX_LISTED else ""
    listed = f"runs in {folder}: {', '.join(ids[:_MAX_LISTED])}{more}"
    return f"run {name} not found; " + (f"did you mean {hint!r}? " if hint else "") + listed


def _ids(folder: str) -> list[str]:
    """Ids of the runs in a folder of logs, newest first."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(_ENDING) and entry.is_file()]
    except OSError:
        return []
    entries.sort(key=lambda entry: (-entry.stat().st_mtime, entry.name))
    return [entry.name.removesuffix(_ENDING) for entry in entries]
