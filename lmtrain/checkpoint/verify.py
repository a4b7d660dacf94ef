"""Integrity check of checkpoints, and choice of the newest valid one."""

from collections.abc import Callable, Collection, Sequence

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.manifest import DamagedError, check_sizes, wrong_bytes
from lmtrain.config.errors import UserError
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes

# Level of the check: checksums of all files, or only their existence and sizes.
FULL, SIZES = "full", "sizes"


def verify(
    checkpoint: Checkpoint, how: str, processes: Processes = ALONE, parts: Collection[str] | None = None
) -> None:
    """Raise `DamagedError` with the names of corrupt files. `parts`: the parts of the arrays to check; None: all.

    All processes have to call it: each reads a share of the files, and all get the same result.
    """
    failure: Exception | None = None
    problem = ""
    try:
        problem = _problem(checkpoint, how, processes, parts)
    except (DamagedError, FileNotFoundError) as error:
        problem = str(error)
    except (UserError, OSError) as error:  # a disk or store that does not respond does not mean a corrupt checkpoint
        failure = error
    reported = gather(processes, "verify", [problem, None if failure is None else str(failure)])
    failures = [text for _, text in reported if text is not None]
    if failures:
        raise UserError(f"{checkpoint.path} cannot be checked: {failures[0]}") from failure
    problems = [text for text, _ in reported if text]
    if problems:
        raise DamagedError("; ".join(dict.fromkeys(problems)))


def _problem(checkpoint: Checkpoint, how: str, processes: Processes, parts: Collection[str] | None) -> str:
    """Problems in this process's share of the files; empty if there are none."""
    manifest = checkpoint.read_manifest()
    if manifest.step != checkpoint.step:
        return f"its manifest belongs to step {manifest.step}"
    if processes.is_first:
        check_sizes(checkpoint.path, manifest)
    if how == SIZES:
        return ""
    names = [name for name in sorted(manifest.files) if parts is None or "/" not in name or name.split("/")[0] in parts]
    share = names[processes.index :: processes.count]
    wrong = wrong_bytes(checkpoint.path, manifest, share)
    return "; ".join(f"{name}: checksum mismatch" for name in wrong)


def newest_intact(
    found: Sequence[Checkpoint],
    how: str,
    processes: Processes,
    when_damaged: Callable[[Checkpoint, DamagedError], None],
    parts: Collection[str] | None = None,
) -> Checkpoint | None:
    """The last valid checkpoint of `found`; `when_damaged` is called for each corrupt one after it."""
    for checkpoint in reversed(found):
        try:
            verify(checkpoint, how, processes, parts)
        except DamagedError as error:
            when_damaged(checkpoint, error)
            continue
        return checkpoint
    return None


def choose_checkpoint(
    path: str, how: str, processes: Processes = ALONE, parts: Collection[str] | None = None
) -> Checkpoint:
    """The checkpoint at `path`, or the newest valid one below it (a run folder or any parent).

    Nothing is renamed: the folder may belong to another run. Raises `UserError` if there is no valid checkpoint.
    """
    listed = [[found.step, found.path] for found in find_checkpoints(path)]
    found = [Checkpoint(step, place) for step, place in gather(processes, "found", listed)[0]]

    def report(checkpoint: Checkpoint, error: DamagedError) -> None:
        log.error(f"{checkpoint.path} is corrupt: {error}")

    newest = newest_intact(found, how, processes, report, parts)
    if newest is None:
        raise UserError(
            f"checkpoint {path}: {'it is corrupt' if len(found) == 1 else f'all {len(found)} are corrupt'}, see above"
        )
    return newest
