"""Which checkpoint to trust: the newest whose files are what was written."""

from collections.abc import Callable, Collection, Sequence

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.manifest import DamagedError, check_sizes, wrong_bytes
from lmtrain.config.errors import UserError
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes

# How thorough: every byte, or that all files are there with their sizes.
FULL, SIZES = "full", "sizes"


def verify(
    checkpoint: Checkpoint, how: str, processes: Processes = ALONE, parts: Collection[str] | None = None
) -> None:
    """Raise `DamagedError` naming what is not as it was written, of these parts of the arrays; None: of everything.

    Of several processes, which all have to call it, each reads a share of the files, and all come to the same answer.
    """
    failure: Exception | None = None
    problem = ""
    try:
        problem = _problem(checkpoint, how, processes, parts)
    except (DamagedError, FileNotFoundError) as error:
        problem = str(error)
    except (UserError, OSError) as error:  # a disk or store that does not answer has damaged nothing
        failure = error
    told = gather(processes, "verify", [problem, None if failure is None else str(failure)])
    failures = [text for _, text in told if text is not None]
    if failures:
        raise UserError(f"{checkpoint.path} cannot be checked: {failures[0]}") from failure
    problems = [text for text, _ in told if text]
    if problems:
        raise DamagedError("; ".join(dict.fromkeys(problems)))


def _problem(checkpoint: Checkpoint, how: str, processes: Processes, parts: Collection[str] | None) -> str:
    """What is wrong with this process's share; empty if nothing is."""
    manifest = checkpoint.read_manifest()
    if manifest.step != checkpoint.step:
        return f"its manifest is of step {manifest.step}"
    if processes.is_first:
        check_sizes(checkpoint.path, manifest)
    if how == SIZES:
        return ""
    names = [name for name in sorted(manifest.files) if parts is None or "/" not in name or name.split("/")[0] in parts]
    share = names[processes.index :: processes.count]
    wrong = wrong_bytes(checkpoint.path, manifest, share)
    return "; ".join(f"{name} does not match its checksum" for name in wrong)


def newest_intact(
    found: Sequence[Checkpoint],
    how: str,
    processes: Processes,
    when_damaged: Callable[[Checkpoint, DamagedError], None],
    parts: Collection[str] | None = None,
) -> Checkpoint | None:
    """The last of the checkpoints that verifies; those after it are handed to `when_damaged`."""
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
    """The checkpoint at `path`, or the newest that verifies in the run folder or any parent that `path` names.

    Nothing is moved: the folder may be another run's. Raises `UserError` if there is none.
    """
    listed = [[found.step, found.path] for found in find_checkpoints(path)]
    found = [Checkpoint(step, place) for step, place in gather(processes, "found", listed)[0]]

    def tell(checkpoint: Checkpoint, error: DamagedError) -> None:
        log.error(f"{checkpoint.path} is damaged: {error}")

    newest = newest_intact(found, how, processes, tell, parts)
    if newest is None:
        raise UserError(
            f"checkpoint {path}: {'it' if len(found) == 1 else f'each of {len(found)}'} is damaged, see above"
        )
    return newest
