"""Where the exports of a run are."""

from lmtrain.runtime.run_path import run_path
from lmtrain.runtime.storage import file_size, join


def export_folder(hf_save_path: str | None, run: str) -> str | None:
    """The folder of a run's exports, if they go to a folder."""
    return run_path(hf_save_path, run) if hf_save_path else None


def is_missing(folder: str | None, step: int) -> bool:
    """Whether the export of a step is not there, where it should be."""
    return folder is not None and file_size(join(folder, f"step-{step}", "config.json")) is None
