"""Integrity check of checkpoints, and choice of the newest valid one."""

from collections.abc import Collection, Sequence

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.manifest import DamagedError, check_sizes, wrong_bytes
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE, Processes, log

# Level of the check: checksums of all files, or only their existence and sizes.
FULL, SIZES = "full", "sizes"


def verify(
    checkpoint: Checkpoint, how: str, processes: Processes = ALONE, parts: Collection[str] | None = None
) -> None:
    """Raise `DamagedError` with the names of corrupt files. `parts`: the parts of the arrays to check; None: all.

    All processes have to call it: each reads a share of the files, and all get the same result.
    """
    problem = failure = None
    try:
        problem = _problem(checkpoint, how, processes, parts)
    except (DamagedError, FileNotFoundError) as error:
        problem = str(error)
    except (UserError, OSError) as error:  # a disk or store that does not respond does not mean a corrupt checkpoint
        failure = str(error) or type(error).__name__
    problems, failures = zip(*gather(processes, "verify", [problem, failure]), strict=True)
    if any(failures):
        raise UserError(f"{checkpoint.path} cannot be checked: {next(filter(None, failures))}")
    if any(problems):
        raise DamagedError("; ".join(dict.fromkeys(filter(None, problems))))


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
    checkpoints: Sequence[Checkpoint], how: str, processes: Processes, parts: Collection[str] | None = None
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The last valid checkpoint of `checkpoints`, and the corrupt ones after it, which are logged."""
    corrupt = []
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint, how, processes, parts)
        except DamagedError as error:
            if processes.is_first:
                log.error(f"{checkpoint.path} is corrupt: {error}")
            corrupt.append(checkpoint)
            continue
        return checkpoint, corrupt
    return None, corrupt


def choose_checkpoint(
    path: str, how: str, processes: Processes = ALONE, parts: Collection[str] | None = None
) -> Checkpoint:
    """The checkpoint at `path`, or the newest valid one below it (a run folder or any parent).

    Nothing is renamed: the folder may belong to another run. Raises `UserError` if there is no valid checkpoint.
    """
    listed = [[checkpoint.step, checkpoint.path] for checkpoint in find_checkpoints(path)]
    checkpoints = [Checkpoint(*entry) for entry in gather(processes, "found", listed)[0]]
    newest, _ = newest_intact(checkpoints, how, processes, parts)
    if newest is None:
        problem = "it is corrupt" if len(checkpoints) == 1 else f"all {len(checkpoints)} are corrupt"
        raise UserError(f"checkpoint {path}: {problem}, see above")
    return newest
