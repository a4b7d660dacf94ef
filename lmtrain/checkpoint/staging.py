"""Local staging of checkpoints at URLs that Orbax does not support: all but `gs://`."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lmtrain.checkpoint.discovery import Checkpoint, step_folder
from lmtrain.checkpoint.manifest import DamagedError, wrong_bytes
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.storage import download, is_url, join, upload

_PREFIX = "lmtrain-checkpoint-"
_TRANSFERS = 8


class Staging:
    """Folder where checkpoints are written: the final one, or a staging folder in `directory`, shared by all processes.

    Without `directory`, the staging folder is in the system's folder for temporary files.
    """

    def __init__(self, run_folder: str, directory: str | None, processes: Processes):
        self._run_folder = run_folder
        self._directory = _directory(directory)
        self._processes = processes
        self._needed = _needs_copy(run_folder)
        # unique to this run, so that files of a killed process can be deleted
        self._prefix = f"{_PREFIX}{hashlib.sha256(run_folder.encode()).hexdigest()[:12]}-"
        if self._needed and processes.is_first and os.path.isdir(self._directory):
            for name in os.listdir(self._directory):
                if name.startswith(self._prefix):
                    shutil.rmtree(os.path.join(self._directory, name), ignore_errors=True)

    def prepare(self, step: int, size: int) -> str:
        """The folder to write `size` bytes to. Raises `UserError` if the disk is too full or not shared."""
        if not self._needed:
            return step_folder(self._run_folder, step)
        made = None
        if self._processes.is_first:
            _check_room(self._directory, size)
            made = tempfile.mkdtemp(dir=self._directory, prefix=self._prefix)
        made = gather(self._processes, "staging", made)[0]
        if not all(gather(self._processes, "staging seen", os.path.isdir(made))):
            raise UserError(
                f"trainer.checkpointer.staging_dir: {self._directory} is not shared by all processes of the run"
            )
        return os.path.join(made, os.path.basename(step_folder(self._run_folder, step)))

    def upload(self, written: str, step: int, names: Sequence[str]) -> None:
        """Upload files of the staging folder `written` to the checkpoint; nothing to do without staging."""
        if self._needed:
            target = step_folder(self._run_folder, step)
            with ThreadPoolExecutor(_TRANSFERS) as pool:
                list(pool.map(lambda name: upload(os.path.join(written, name), join(target, name)), names))

    def clear(self, written: str) -> None:
        """Delete the local copy."""
        if self._needed and self._processes.is_first and written:
            shutil.rmtree(os.path.dirname(written), ignore_errors=True)


@contextmanager
def local_copy(checkpoint: Checkpoint, parts: Sequence[str], directory: str | None = None) -> Iterator[str]:
    """A path to read arrays from: the checkpoint, or a local copy of these parts if it is at a URL that needs one.

    Raises `UserError` if the disk is too small, and `DamagedError` for a missing file or a checksum mismatch.
    """
    if not _needs_copy(checkpoint.path):
        yield checkpoint.path
        return
    manifest = checkpoint.read_manifest()
    names = [name for name in manifest.files if "/" not in name or name.split("/")[0] in parts]
    folder = _directory(directory)
    _check_room(folder, sum(manifest.files[name].size for name in names))
    with tempfile.TemporaryDirectory(dir=folder, prefix=_PREFIX) as temporary:

        def fetch(name: str) -> None:
            target = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            download(join(checkpoint.path, name), target)

        with ThreadPoolExecutor(_TRANSFERS) as pool:
            try:
                list(pool.map(fetch, names))
            except FileNotFoundError as error:
                raise DamagedError(f"{checkpoint.path}: a file is missing: {error}") from None
        wrong = wrong_bytes(temporary, manifest, names, fetch)
        if wrong:
            raise DamagedError(f"{checkpoint.path}: checksum mismatch after the download: {', '.join(wrong)}")
        yield temporary


def _needs_copy(path: str) -> bool:
    return is_url(path) and not path.startswith("gs://")


def _directory(configured: str | None) -> str:
    return os.path.expanduser(configured) if configured else tempfile.gettempdir()


def _check_room(folder: str, needed: int) -> None:
    os.makedirs(folder, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {format_bytes(free)} free, staging this checkpoint takes {format_bytes(needed)}; "
            "set trainer.checkpointer.staging_dir to a folder on a larger disk"
        )
