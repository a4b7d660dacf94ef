"""Paths of the exports of a run."""

from lmtrain.runtime.run_path import run_path
from lmtrain.runtime.storage import file_size, join


def export_folder(hf_save_path: str | None, run: str) -> str | None:
    """Folder of a run's exports; None if hf_save_path is not set."""
    return run_path(hf_save_path, run) if hf_save_path else None


def is_missing(folder: str | None, step: int) -> bool:
    """Whether the export of a step is missing from its folder."""
    return folder is not None and file_size(join(folder, f"step-{step}", "config.json")) is None
