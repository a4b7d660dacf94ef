"""Weights of a Hugging Face model in a folder, in a folder at a URL, or on the Hub.

model.safetensors, or the files in model.safetensors.index.json        read tensor by tensor, also from URLs
pytorch_model.bin, or the files in pytorch_model.bin.index.json        local files only; requires torch
"""

import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.safetensors_file import TensorInfo, check_length, read_header, read_rows, read_tensor
from lmtrain.runtime.storage import file_size, is_url, join, read_bytes


class Weights(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors by name."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes of all tensors by name, such as bfloat16."""

    def read(self, name: str) -> np.ndarray:
        """Read one tensor in its stored dtype."""

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Read the rows `first` up to `last` of a tensor."""


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
        values = json.loads(read_bytes(path))
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
    """Open the model's tensors, safetensors first. Raises `UserError` if there are no readable weights.

    `stem` of the file names: `model`, or `adapter_model` for adapters of PEFT.
    """
    torch_stem = "pytorch_model" if stem == "model" else stem
    for index, single, kind in (
        (f"{stem}.safetensors.index.json", f"{stem}.safetensors", SafetensorsWeights),
        (f"{torch_stem}.bin.index.json", f"{torch_stem}.bin", TorchWeights),
    ):
        listed = read_model_json(ref, index)
        if listed is not None:
            return kind([_file(ref, name) for name in sorted(set(_weight_map(listed, ref, index).values()))])
        path = locate(ref, single)
        if path is not None:
            return kind([path])
    raise UserError(f"{ref}: there is no {stem}.safetensors and no {torch_stem}.bin")


class SafetensorsWeights:
    """Tensors of safetensors files."""

    def __init__(self, paths: list[str]):
        self._where: dict[str, tuple[str, TensorInfo]] = {}
        for path in paths:
            found = read_header(path)
            # every process checks this before any reads its share: if one stopped alone, the others would wait for it
            check_length(path, found)
            twice = sorted(found.keys() & self._where.keys())
            if twice:
                raise UserError(f"{path}: {twice[0]} is also in {self._where[twice[0]][0]}")
            self._where |= {name: (path, info) for name, info in found.items()}
        self.shapes = {name: info.shape for name, (_, info) in self._where.items()}
        self.dtypes = {name: str(info.dtype) for name, (_, info) in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        return read_tensor(*self._where[name])

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        return read_rows(*self._where[name], first, last)


class TorchWeights:
    """Tensors of files in the format of torch, memory-mapped. Only tensors are loaded, code is never run."""

    def __init__(self, paths: list[str]):
        from lmtrain.hf.torch_file import open_torch

        self._tensors: dict[str, Any] = {}
        for path in paths:
            self._tensors |= open_torch(path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        from lmtrain.hf.torch_file import to_numpy

        return to_numpy(self._tensors[name])

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        from lmtrain.hf.torch_file import to_numpy

        return to_numpy(self._tensors[name][first:last])


def _file(ref: str, name: str) -> str:
    path = locate(ref, name)
    if path is None:
        raise UserError(f"{ref}: {name} is missing, but the index lists it; the copy may be incomplete")
    return path


def _weight_map(listed: Mapping[str, Any], ref: str, index: str) -> Mapping[str, str]:
    found = listed.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise UserError(f"{ref}: {index} has no weight_map")
    return found
