"""Weights of a Hugging Face model in a folder, in a folder at a URL, or on the Hub; also PyTorch's `.bin` files.

model.safetensors, else the files in model.safetensors.index.json      read tensor by tensor, also from URLs
pytorch_model.bin, else the files in pytorch_model.bin.index.json      local files only; requires torch
"""

import os
import pickle
import posixpath
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from lmtrain.hf.mxfp4 import Mxfp4Weights, unpacked
from lmtrain.hf.safetensors_file import SafetensorsWeights
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import file_size, is_url, join, read_json, read_range
from lmtrain.runtime.text import refuse_pointer

_START_BYTES = 64


class TorchWeights:
    """Tensors of files in the format of torch, memory-mapped. Only tensors are loaded, code is never run."""

    def __init__(self, paths: list[str]):
        self._tensors: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        for path in paths:
            tensors = _open(path)
            if twice := sorted(tensors.keys() & self.files.keys()):
                raise UserError(f"{path}: {twice[0]} is also in {self.files[twice[0]]}")
            self._tensors |= tensors
            self.files |= dict.fromkeys(tensors, path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return _to_numpy(self._tensors[name])

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        return _to_numpy(self._tensors[name][first:last])


def _open(path: str) -> dict[str, Any]:
    """Tensors of a file, memory-mapped. Raises `UserError` without torch, or if the file has other contents."""
    if is_url(path):
        raise UserError(f"{path}: torch files can only be read from local folders; copy the folder first")
    refuse_pointer(read_range(path, 0, _START_BYTES), path)
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: requires torch: run `pip install torch`, or save the model as safetensors with save_pretrained"
        ) from None
    try:
        # files from before torch 1.6 are not zip files, and only zip files can be mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise UserError(f"{path}: holds more than tensors, or is corrupt; code in it is never run") from None
    except Exception as error:  # zip and torch errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: torch cannot load it: {reason}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()
    ):
        raise UserError(f"{path}: not a map of names to tensors")
    return tensors


def _to_numpy(tensor: Any) -> np.ndarray:
    """Copy a torch tensor to numpy; bfloat16, which numpy lacks, is read as bits."""
    import torch

    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.bfloat16:
        as_bits: np.ndarray = tensor.view(torch.uint16).numpy()
        return as_bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array


# Tensors by name, with their `shapes`, `dtypes` (such as bfloat16) and `files`, each read in its stored dtype.
Weights = SafetensorsWeights | TorchWeights | Mxfp4Weights


def locate(ref: str, name: str) -> str | None:
    """Path or URL of a file of the model `ref`; None if the model has no such file.

    Raises `UserError` if the model is not found or unavailable.
    """
    folder = os.path.expanduser(ref)
    if is_url(ref) or os.path.isdir(folder):
        path = join(ref, name)
        return path if file_size(path) is not None else None
    if ref.startswith((".", "/", "~")):
        without, at, revision = ref.rpartition("@")
        if at and os.path.isdir(os.path.expanduser(without)):
            raise UserError(f"{ref}: {without} is a folder, which has no revisions; remove @{revision}")
        raise UserError(f"{ref}: no such folder")
    from lmtrain.hf.hub import fetch_file

    try:
        return fetch_file(ref, name)
    except UserError as error:
        raise UserError(f"{error}\n  there is no local folder {ref} either") from None


def read_model_json(ref: str, name: str) -> dict[str, Any] | None:
    """Content of a JSON file of the model; None if there is no such file."""
    path = locate(ref, name)
    if path is None:
        return None
    try:
        values = read_json(path)
    except ValueError as error:
        raise UserError(f"{ref}: {name} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{ref}: {name} is not a JSON object")
    return values


def read_model_config(ref: str) -> dict[str, Any]:
    """Content of the model's `config.json`. Raises `UserError` if it is missing."""
    values = read_model_json(ref, "config.json")
    if values is None and locate(ref, "adapter_config.json") is not None:
        raise UserError(
            f"{ref}: is a PEFT adapter, not a model; merge it into its base, with `lmtrain export-hf --merge` or PEFT; "
            "lora.initialize_from starts training from it"
        )
    if values is None:
        raise UserError(f"{ref}: there is no config.json; not a Hugging Face model")
    return values


def open_weights(ref: str, stem: str = "model") -> Weights:
    """Open the model's tensors: of the file that transformers reads, safetensors first, one file before an index.

    `stem` of the file names: `model`, or `adapter_model` for adapters of PEFT. Raises `UserError` if there are no
    readable weights, or if an index does not describe its files. Tensors in MXFP4 are read as bfloat16.
    """
    torch_stem = "pytorch_model" if stem == "model" else stem
    for single, kind in ((f"{stem}.safetensors", SafetensorsWeights), (f"{torch_stem}.bin", TorchWeights)):
        name = f"{single}.index.json"
        index, path = read_model_json(ref, name), locate(ref, single)
        files = {} if index is None else _listed_files(ref, name, index)
        if path is not None:
            if others := sorted(set(files.values()) - {single}):
                log.warning(
                    f"{ref}: {single} is read, as by transformers, and not the {counted(len(others), 'file')} of {name}"
                    f" ({others[0]}, ...); one of the two may be older: remove it"
                )
            return unpacked(kind([path]))
        if index is not None:
            paths = {file: _file(ref, file) for file in sorted(set(files.values()))}
            weights = kind(list(paths.values()))
            _check_index(f"{ref}: {name}", {tensor: paths[file] for tensor, file in files.items()}, weights)
            return unpacked(weights)
    raise UserError(f"{ref}: there is no {stem}.safetensors and no {torch_stem}.bin")


def _check_index(where: str, listed: Mapping[str, str], weights: Weights) -> None:
    """Raise `UserError` unless each tensor is in the file that the index lists for it, and in no other."""
    remedy = "the files may be of different versions of the model; download or save all of them again"
    for tensor in sorted(listed.keys() | weights.files.keys()):
        there, here = listed.get(tensor), weights.files.get(tensor)
        if there is None:
            raise UserError(f"{where} does not list {tensor}, which {here} has; {remedy}")
        if there != here:
            raise UserError(f"{where} lists {tensor} for {there}, which does not have it; {remedy}")


def _file(ref: str, name: str) -> str:
    path = locate(ref, name)
    if path is None:
        raise UserError(f"{ref}: {name} is missing, but the index lists it; the copy may be incomplete")
    return path


def _listed_files(ref: str, name: str, index: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor in an index. Raises `UserError` for an invalid one, or a file outside of the folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{ref}: {name} has no weight_map")
    for file in weight_map.values():
        if "://" in file or "\\" in file or posixpath.isabs(file) or ".." in file.split("/"):
            raise UserError(
                f"{ref}: {name} names {file!r}, which is not in the model's folder; nothing outside is read"
            )
    return weight_map
