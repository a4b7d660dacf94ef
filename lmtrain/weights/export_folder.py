"""Folders of exports: whose they are, how an export replaces an earlier one, and what a killed process leaves.

An export is written to `<output>.tmp-<process>` and then moved to `output`. A local folder is renamed, and the earlier
one is `<output>.old-<process>` meanwhile. Object stores cannot rename a folder: there the objects are replaced one by
one, and while that takes, `output` also holds the object `lmtrain.partial`, which is written first and deleted last. So
an interrupted export is recognized by that object, or by the folders next to it.
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from lmtrain import __version__
from lmtrain.hf.tokenizer import TOKENIZER_FILES
from lmtrain.hf.weight_files import read_model_json
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import open_fs, remote_errors
from lmtrain.runtime.storage import (
    delete_file,
    delete_folder,
    file_size,
    is_url,
    join,
    list_names,
    read_bytes,
    read_json,
    run_path,
    write_json,
)
from lmtrain.weights.model_card import CARD, is_unchanged_card

# The dtypes of exports.
EXPORT_DTYPES = ("float32", "bfloat16")

PARTIAL = "lmtrain.partial"

# Adapters have no config.json. PEFT accepts no further keys in adapter_config.json, so their marks are in a third file.
MODEL_CONFIG, ADAPTER_CONFIG, ADAPTER_MARKS = "config.json", "adapter_config.json", "lmtrain.json"

# Marks of an export: the version of lmtrain that wrote the folder, the model's run, and a hash of its data; and of
# adapters the base that they were trained on.
_VERSION, _RUN, _DATA, _BASE = "lmtrain_version", "lmtrain_run", "lmtrain_data", "lmtrain_base"

_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|model.*\.safetensors(\.index\.json)?|.*\.py"
    r"|adapter_config\.json|adapter_model\.safetensors|lmtrain\.json"
)
_TEMPORARY = re.compile(r"\.tmp-\d+$")
_STEP = re.compile(r"(step-\d+)\.(?:tmp|old)-\d+")


class BaseIdentity(NamedTuple):
    """The base of adapters: the dtype of its parameters, and their fingerprint, which depends on the dtype."""

    fingerprint: str
    dtype: str


class ModelOrigin(NamedTuple):
    """The run of a model: its id, and a hash of its data, since runs of two projects may share an id.

    `base` is the base of adapters.
    """

    run: str
    data: str
    base: BaseIdentity | None = None


def marks_of(origin: ModelOrigin | None, with_base: bool = False) -> dict[str, Any]:
    """What identifies an export as one of lmtrain, and its run; and the base of adapters."""
    marks: dict[str, Any] = {_VERSION: __version__}
    if origin is not None:
        marks |= {_RUN: origin.run, _DATA: origin.data}
        if with_base and origin.base is not None:
            marks[_BASE] = origin.base._asdict()
    return marks


def base_of_adapter(ref: str) -> BaseIdentity | None:
    """The base of the adapter `ref`; None if it is not an export of lmtrain, or of a version that did not record it."""
    base = (read_model_json(ref, ADAPTER_MARKS) or {}).get(_BASE)
    try:
        return None if base is None else BaseIdentity(str(base["fingerprint"]), str(base["dtype"]))
    except (TypeError, KeyError):
        return None


def check_output(output: str, extra_files: Collection[str] = ()) -> None:
    """Check that `output` is empty or an earlier lmtrain export, complete or interrupted.

    Creates the parent folders of a local path. Raises `UserError` if `output` holds anything else or cannot be created.
    """
    if not output:
        raise UserError("--output: expected a folder or URL")
    folder = output if is_url(output) else os.path.realpath(os.path.expanduser(output))
    if not is_url(output):
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f"--output {output}: exists and is a file")
        if folder in (os.path.realpath(os.curdir), "/"):
            raise UserError(f"--output {output}: the current folder and / cannot be replaced; choose a subfolder")
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {output}: cannot be created: {error.strerror}") from None
    names = list_names(folder)
    if not names:
        return
    if _VERSION not in _read_marks(folder):
        raise UserError(f"--output {output}: not empty and not an lmtrain export; choose another folder")
    others = [name for name in names if not (is_written(name) or name in extra_files)]
    if CARD in names and not is_unchanged_card(read_bytes(join(folder, CARD))):
        others.insert(0, f"{CARD} with changes of your own")
    if others:
        raise UserError(
            f"--output {output}: the export to be replaced also holds {', '.join(others[:3])}; move it away, or choose "
            "another folder"
        )


def check_same_run(output: str, origin: ModelOrigin) -> None:
    """Raise `UserError` if `output` has an export of another run or of an unknown run."""
    marks = _read_marks(output if is_url(output) else os.path.expanduser(output))
    if not marks or (marks.get(_RUN) == origin.run and marks.get(_DATA, origin.data) == origin.data):
        return
    whose = f"of the run {marks[_RUN]}" if _RUN in marks else "of an unknown run"
    other = f"{origin.run} on other data" if marks.get(_RUN) == origin.run else origin.run
    raise UserError(
        f"--output {output}: holds an export {whose}, but this one is of {other}; choose another folder, or add "
        "--overwrite"
    )


def _read_marks(folder: str) -> dict[str, Any]:
    """Content of the file with the marks of an export; empty if it is missing or invalid."""
    paths = [join(folder, name) for name in (PARTIAL, MODEL_CONFIG, ADAPTER_MARKS)]
    path = next((path for path in paths if file_size(path) is not None), None)
    try:
        values = {} if path is None else read_json(path)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def export_folder(hf_save_path: str | None, run: str) -> str | None:
    """Folder of a run's exports; None if hf_save_path is not set."""
    return run_path(hf_save_path, run) if hf_save_path else None


def is_missing(folder: str | None, step: int) -> bool:
    """Whether the export of a step is missing from its folder, or was interrupted."""
    if folder is None:
        return False
    output = join(folder, f"step-{step}")
    return not _is_complete(list_names(output)) or bool(_left_by_kills(output))


def is_written(name: str) -> bool:
    """Whether exports have a file of this name, or of the name while it is written."""
    name = _TEMPORARY.sub("", name)
    return name in (PARTIAL, CARD, *TOKENIZER_FILES) or bool(_WRITTEN.fullmatch(name))


def temporary_folder(output: str) -> str:
    """The folder in which this process writes an export to `output`."""
    return f"{output}.tmp-{os.getpid()}"


def put_in_place(temporary: str, output: str, names: Sequence[str], mark: Mapping[str, Any]) -> None:
    """Replace `output` with the complete export in `temporary`, which has the files `names`.

    `mark` identifies the export to `check_same_run` if a kill interrupts this. At a URL the files are copied in the
    order of `names`, with the settings among the last, since nothing loads without them; and the earlier settings are
    deleted first.
    """
    if not is_url(output):
        before = f"{output}.old-{os.getpid()}"
        if os.path.isdir(output):
            os.rename(output, before)
        os.rename(temporary, output)
        shutil.rmtree(before, ignore_errors=True)
        return
    write_json(join(output, PARTIAL), mark)
    _delete_objects(output)
    with remote_errors(output, "written"):
        fs, inside = open_fs(output)
        _, source = open_fs(temporary)
        for name in names:
            fs.cp_file(f"{source}/{name}", f"{inside}/{name}")
    delete_file(join(output, PARTIAL))


def remove_interrupted(output: str) -> None:
    """Remove what killed exports to `output` have left, and `output` if its replacement was interrupted.

    A local export that was complete and only not renamed is renamed. Nothing is removed that has other files.
    """
    left = _left_by_kills(output)
    names = list_names(output)
    if PARTIAL in names and all(map(is_written, names)):
        _delete_objects(output)
        delete_file(join(output, PARTIAL))
    for path in left:
        written = path.replace(f"{output}.old-", f"{output}.tmp-")
        if written != path and written in left and not os.path.exists(output) and _is_complete(list_names(written)):
            os.rename(written, output)
    for path in left:
        delete_folder(path)


def remove_interrupted_steps(folder: str) -> None:
    """`remove_interrupted` for all exports of a run, at its start."""
    for name in sorted({match[1] for name in list_names(folder) if (match := _STEP.fullmatch(name))}):
        remove_interrupted(join(folder, name))


def _is_complete(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names has a complete export."""
    return PARTIAL not in names and (MODEL_CONFIG in names or ADAPTER_CONFIG in names)


def _left_by_kills(output: str) -> list[str]:
    """Folders next to `output` that killed exports to it have left; not those that have other files."""
    folder, _, name = output.rpartition("/")
    pattern = re.compile(re.escape(name) + r"\.(tmp|old)-\d+")
    paths = [join(folder, other) for other in list_names(folder) if pattern.fullmatch(other)]
    return [path for path in paths if all(map(is_written, list_names(path)))]


def _delete_objects(output: str) -> None:
    """Delete the files of an export at a URL, its settings first, but for the marker."""
    names = [name for name in list_names(output) if name != PARTIAL]
    for name in sorted(names, key=lambda name: name not in (MODEL_CONFIG, ADAPTER_CONFIG)):
        delete_file(join(output, name))
