"""Weight files that torch wrote. The only file that imports torch, which has to be installed for it."""

import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import is_url


def open_torch(path: str) -> dict[str, Any]:
    """The tensors of a file, mapped rather than read. Raises `UserError` without torch, or if it holds other things."""
    if is_url(path):
        raise UserError(f"{path}: files of torch are read from local folders only; copy the folder first")
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path}: to read it, `pip install torch`; or save the model with save_pretrained, as safetensors"
        ) from None
    try:
        # files from before torch 1.6 are no zip files, and only zip files can be mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise UserError(f"{path}: holds more than tensors, or is damaged; code in it is never run") from None
    except Exception as error:  # zip and torch errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: torch cannot load it: {reason}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()
    ):
        raise UserError(f"{path}: not a map of names to tensors")
    return tensors


def to_numpy(tensor: Any) -> np.ndarray:
    """A copy of a torch tensor's values; numpy has no bfloat16 of its own."""
    import torch

    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.bfloat16:
        as_bits: np.ndarray = tensor.view(torch.uint16).numpy()
        return as_bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array
