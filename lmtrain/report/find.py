"""Finding the files of a run that the user names: by its metrics, by its folder of logs, or by its id alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name

_ENDING = ".metrics.jsonl"
_MOST_LISTED = 20


@dataclass(frozen=True)
class RunFiles:
    """`metrics` is there; `folder`, with the config and the ledger of times, need not be."""

    id: str
    metrics: str
    folder: str


def find_run(name: str, log_dir: str) -> RunFiles:
    """`name` is a metrics.jsonl, `<log_dir>/<run_id>`, a run id, or the beginning of only one.

    Raises `UserError` that says what there is.
    """
    if "://" in name:
        raise UserError(f"{name}: a report is made of local files; copy <run id>{_ENDING} and <run id>/ here first")
    log_dir = os.path.expanduser(log_dir)
    base = os.path.expanduser(name).rstrip("/") or name
    for path in (base, f"{base}{_ENDING}", f"{os.path.abspath(base)}{_ENDING}", os.path.join(log_dir, base + _ENDING)):
        if os.path.isfile(path):
            return _files(path)
    folder = os.path.dirname(base) or log_dir
    begin_so = [run for run in _ids(folder) if run.startswith(os.path.basename(base))]
    if len(begin_so) == 1:
        return _files(os.path.join(folder, begin_so[0] + _ENDING))
    if begin_so and os.path.basename(base):
        raise UserError(f"{name} may be {', '.join(begin_so[:_MOST_LISTED])}")
    raise UserError(_unknown(name, base, log_dir))


def find_runs(names: Sequence[str], log_dir: str) -> list[RunFiles]:
    """All of them, each once. Raises `UserError` for one that is named twice."""
    found = [find_run(name, log_dir) for name in names]
    seen: dict[str, str] = {}
    for name, files in zip(names, found, strict=True):
        place = os.path.realpath(files.metrics)
        if place in seen:
            raise UserError(f"{seen[place]} and {name} are the same run: {files.metrics}")
        seen[place] = name
    return found


def tell_apart(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its id, and where others have the same id as much of the folder as it takes."""
    return [_name(run, [other for other in runs if other.id == run.id]) for run in runs]


def _name(run: RunFiles, same: Sequence[RunFiles]) -> str:
    if len(same) == 1:
        return run.id
    places = [os.path.dirname(os.path.abspath(other.metrics)).split(os.sep) for other in same]
    own = places[same.index(run)]
    for depth in range(1, len(own)):
        if [place[-depth:] for place in places].count(own[-depth:]) == 1:
            return f"{run.id} ({os.sep.join(own[-depth:])})"
    return f"{run.id} ({run.metrics})"  # logs of one folder whose names differ in the ending


def _files(metrics: str) -> RunFiles:
    name = os.path.basename(metrics)
    run = name.removesuffix(_ENDING) if name.endswith(_ENDING) else os.path.splitext(name)[0]
    return RunFiles(run, metrics, os.path.join(os.path.dirname(metrics), run))


def _unknown(name: str, base: str, log_dir: str) -> str:
    """The folder that is looked in is the one named, if it is a folder of logs, or the one above the run named."""
    folder = base if os.path.isdir(base) and _ids(base) else os.path.dirname(base) or log_dir
    ids = _ids(folder)
    if not ids:
        return f"no run {name}: no {base}{_ENDING}, and no *{_ENDING} in {folder}; --log_dir says where runs log"
    last = os.path.basename(base).removesuffix(_ENDING)
    hint = next((run for run in ids if run.startswith(last)), None) or suggest_name(last, ids)
    more = f", and {len(ids) - _MOST_LISTED} more" if len(ids) > _MOST_LISTED else ""
    listed = f"in {folder} there are: {', '.join(ids[:_MOST_LISTED])}{more}"
    return f"no run {name}; " + (f"did you mean {hint!r}? " if hint else "") + listed


def _ids(folder: str) -> list[str]:
    """The runs that log in a folder, the newest first."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(_ENDING) and entry.is_file()]
    except OSError:
        return []
    entries.sort(key=lambda entry: (-entry.stat().st_mtime, entry.name))
    return [entry.name.removesuffix(_ENDING) for entry in entries]
