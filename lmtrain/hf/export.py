"""Export of a model for `transformers`: sharded weights, config and tokenizer, to a folder or a URL.

Files are written under a temporary name, read back and compared, and then renamed.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from lmtrain import __version__
from lmtrain.config.errors import UserError
from lmtrain.config.remote import open_fs, told
from lmtrain.hf.chat_template import tokenizer_contents
from lmtrain.hf.key_map import Piece
from lmtrain.hf.safetensors_file import header_of, read_header, read_tensor, write_tensor
from lmtrain.hf.tokenizer import SETTINGS_FILE, TOKENIZER_FILES, Tokenizer, to_json
from lmtrain.runtime.storage import file_size, is_url, join, list_names, read_bytes, write_bytes, write_json

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_SHARD_BYTES = 5_000_000_000

# Keys in config.json: the version of lmtrain that wrote the folder, the model's run, and a hash of its data.
_MARK, _RUN, _DATA = "lmtrain_version", "lmtrain_run", "lmtrain_data"

# File of tokenizer settings, and the model_max_length that transformers writes for an unknown length.
_UNKNOWN = int(1e30)
_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|model.*\.safetensors(\.index\.json)?|.*\.py"
    r"|adapter_config\.json|adapter_model\.safetensors|lmtrain\.json"
)
# Adapters have no config.json, and PEFT accepts no further keys in adapter_config.json.
_MODEL_CONFIG, _ADAPTER_CONFIG, _ADAPTER_MARK = "config.json", "adapter_config.json", "lmtrain.json"


class Origin(NamedTuple):
    """The run of a model: its id, and a hash of its data, since runs of two projects may share an id."""

    run: str
    data: str


@dataclass(frozen=True)
class Export:
    """Contents of an export, except for the values of the tensors.

    `origin` is the model's run, if any. `seq_len` is the maximum length in tokens, written as `model_max_length` of
    the tokenizer unless its settings have one. `is_adapter`: adapters in PEFT's format, whose `config` is an
    `adapter_config.json`.
    """

    pieces: Sequence[Piece]
    config: Mapping[str, Any]
    extra_files: Mapping[str, bytes]
    tokenizer: Tokenizer
    dtype: str
    origin: Origin | None = None
    seq_len: int | None = None
    is_adapter: bool = False

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(piece.shape) for piece in self.pieces)


def write_export(output: str, export: Export, tensors: Iterable[np.ndarray], shard_bytes: int = _SHARD_BYTES) -> None:
    """Write an export to the folder or URL `output`. `tensors` yields the values of the pieces, in their order.

    Holds one tensor in memory at a time. Raises `UserError` if `output` holds something other than an export.
    """
    check_output(output, export.extra_files)
    # a symbolic link to a folder is kept
    output = output.rstrip("/") if is_url(output) else os.path.realpath(os.path.expanduser(output))
    temporary = f"{output}.tmp-{os.getpid()}"
    _remove(temporary)
    if not is_url(temporary):
        os.makedirs(temporary)
    try:
        names = _write_weights(temporary, export, iter(tensors), shard_bytes)
        for name, values in _configs(export).items():
            write_json(join(temporary, name), values)
            names.append(name)
        others = {**export.extra_files, **_tokenizer_files(export.tokenizer, export.seq_len)}
        for name, content in others.items():
            write_bytes(join(temporary, name), content)
        _put_in_place(temporary, output, [*others, *names])
    finally:
        _remove(temporary)


def _configs(export: Export) -> dict[str, Mapping[str, Any]]:
    """Contents of the JSON files with settings, by name."""
    mark = {_MARK: __version__}
    if export.origin is not None:
        mark |= {_RUN: export.origin.run, _DATA: export.origin.data}
    if export.is_adapter:
        return {_ADAPTER_MARK: mark, _ADAPTER_CONFIG: export.config}
    special = {"eos_token_id": export.tokenizer.eos_id, "bos_token_id": export.tokenizer.bos_id}
    generation = {name: number for name, number in special.items() if number is not None}
    # transformers 5 reads `dtype`, version 4 reads `torch_dtype`
    dtypes = {"dtype": export.dtype, "torch_dtype": export.dtype}
    return {_MODEL_CONFIG: {**export.config, **dtypes, **mark}, "generation_config.json": generation}


def check_output(output: str, extra_files: Iterable[str] = ()) -> None:
    """Check that `output` is empty or an earlier lmtrain export. Creates the parent folders of a local path.

    Raises `UserError` if `output` holds anything else or cannot be created.
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
    if _MARK not in _config_of(folder):
        raise UserError(f"--output {output}: not empty and not an lmtrain export; choose another folder")
    others = [name for name in names if not (_WRITTEN.fullmatch(name) or name in {*TOKENIZER_FILES, *extra_files})]
    if others:
        raise UserError(
            f"--output {output}: the export to be replaced also holds {', '.join(others[:3])}; move it away, or choose "
            "another folder"
        )


def check_same_run(output: str, origin: Origin) -> None:
    """Raise `UserError` if `output` has an export of another run or of an unknown run."""
    found = _config_of(output if is_url(output) else os.path.expanduser(output))
    if not found or (found.get(_RUN) == origin.run and found.get(_DATA, origin.data) == origin.data):
        return
    whose = f"of the run {found[_RUN]}" if _RUN in found else "of an unknown run"
    other = f"{origin.run} on other data" if found.get(_RUN) == origin.run else origin.run
    raise UserError(
        f"--output {output}: holds an export {whose}, but this one is of {other}; choose another folder, or add "
        "--overwrite"
    )


def _config_of(folder: str) -> dict[str, Any]:
    """Content of the file with the marks of an export; empty if it is missing or invalid."""
    paths = [join(folder, name) for name in (_MODEL_CONFIG, _ADAPTER_MARK)]
    path = next((path for path in paths if file_size(path) is not None), None)
    if path is None:
        return {}
    try:
        found = json.loads(read_bytes(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def plan_shards(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of the pieces of each file: in order, up to `most` bytes, at least one piece per file."""
    shards: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(index)
        held += size
    return shards


def _write_weights(folder: str, export: Export, tensors: Iterator[np.ndarray], shard_bytes: int) -> list[str]:
    """Write the weight files, and an index if there are several. Returns their names."""
    dtype = DTYPES[export.dtype]
    sizes = [dtype.itemsize * int(np.prod(piece.shape)) for piece in export.pieces]
    shards = [list(range(len(sizes)))] if export.is_adapter else plan_shards(sizes, shard_bytes)
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    if export.is_adapter:
        names = ["adapter_model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        pieces = [export.pieces[index] for index in shard]
        path = join(folder, name)
        written = {}
        with told(path, "written"), _open_to_write(path) as file:
            file.write(header_of({piece.name: piece.shape for piece in pieces}, dtype))
            for piece in pieces:
                tensor = next(tensors)
                assert tensor.shape == piece.shape, (piece, tensor.shape)
                tensor = np.ascontiguousarray(tensor.astype(dtype, copy=False))
                write_tensor(file, tensor)
                written[piece.name] = _digest(tensor)
        _verify(path, written)
    if len(shards) > 1:
        where = {export.pieces[i].name: name for name, shard in zip(names, shards, strict=True) for i in shard}
        total = {"total_size": sum(sizes), "total_parameters": sum(sizes) // dtype.itemsize}
        write_json(join(folder, "model.safetensors.index.json"), {"metadata": total, "weight_map": where})
        names.append("model.safetensors.index.json")
    return names


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _verify(path: str, written: Mapping[str, bytes]) -> None:
    """Read a file back and compare; a file that differs from the model must not be renamed to its final name."""
    found = read_header(path)
    if found.keys() != written.keys():
        raise OSError(f"{path}: verification failed: other tensors than were written")
    for name, digest in written.items():
        if _digest(read_tensor(path, found[name])) != digest:
            raise OSError(f"{path}: verification failed: checksum mismatch of {name}")


def _digest(tensor: np.ndarray) -> bytes:
    return hashlib.blake2b(tensor.reshape(-1).view(np.uint8).data, digest_size=16).digest()


def _tokenizer_files(tokenizer: Tokenizer, seq_len: int | None) -> dict[str, bytes]:
    """Files of the tokenizer's folder; none for passthrough."""
    folder = os.path.expanduser(tokenizer.path)
    files = tokenizer_contents(folder)
    settings = json.loads(files[SETTINGS_FILE]) if SETTINGS_FILE in files else {}
    if seq_len is not None and settings and settings.get("model_max_length", _UNKNOWN) >= _UNKNOWN:
        settings["model_max_length"] = seq_len
        files[SETTINGS_FILE] = to_json(settings)
    return files


@contextlib.contextmanager
def _open_to_write(path: str) -> Iterator[BinaryIO]:
    if not is_url(path):
        with open(path, "wb") as file:
            yield file
        return
    fs, inside = open_fs(path)
    with fs.open(inside, "wb") as file:
        yield file


def _put_in_place(temporary: str, output: str, names: Sequence[str]) -> None:
    """Rename the temporary folder to `output`, replacing an earlier export.

    Object stores cannot rename a folder. There the old files are deleted, settings first, and the new ones copied in
    the order of `names`, with the settings among the last, since nothing loads without them.
    """
    if not is_url(output):
        before = f"{output}.old-{os.getpid()}"
        if os.path.isdir(output):
            os.rename(output, before)
        os.rename(temporary, output)
        shutil.rmtree(before, ignore_errors=True)
        return
    with told(output, "written"):
        fs, inside = open_fs(output)
        for name in [_MODEL_CONFIG, _ADAPTER_CONFIG, *list_names(output)]:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{inside}/{name}")
        _, source = open_fs(temporary)
        for name in names:
            fs.cp_file(f"{source}/{name}", f"{inside}/{name}")


def _remove(folder: str) -> None:
    """Delete a temporary folder with its contents, if it exists."""
    if not is_url(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    names = list_names(folder)
    if names:
        fs, inside = open_fs(folder)
        with told(folder, "removed"):
            fs.rm(inside, recursive=True)
