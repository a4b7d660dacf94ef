"""Weight files in the format of torch, which require torch."""

import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from lmtrain.config.encodings import refuse_pointer
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import is_url, read_range

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
