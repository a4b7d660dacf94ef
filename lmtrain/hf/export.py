"""Writing a folder that `transformers` loads: weights, config, tokenizer."""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer
from lmtrain.runtime.storage import write_json

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def write_hf_folder(
    output: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], tokenizer: Tokenizer, dtype: str
) -> None:
    """Write everything under a temporary name, compare the weights with what was to be written, then rename.

    Raises `UserError` if `output` holds something that is not an export.
    """
    check_output(output)
    output = os.path.expanduser(output).rstrip("/")
    temporary = f"{output}.tmp-{os.getpid()}"
    os.makedirs(temporary)
    try:
        cast = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}
        weights = os.path.join(temporary, "model.safetensors")
        save_file(cast, weights, metadata={"format": "pt"})
        _verify(weights, cast)
        os.chmod(weights, os.stat(temporary).st_mode & 0o666)  # safetensors makes it readable by its owner only
        # `dtype` is what transformers 5 reads, `torch_dtype` what 4 does
        write_json(os.path.join(temporary, "config.json"), {**config, "dtype": dtype, "torch_dtype": dtype})
        special = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}
        generation = {name: number for name, number in special.items() if number is not None}
        write_json(os.path.join(temporary, "generation_config.json"), generation)
        for name in TOKENIZER_FILES:
            source = os.path.join(os.path.expanduser(tokenizer.path), name)
            if os.path.isfile(source):
                shutil.copyfile(source, os.path.join(temporary, name))
        if os.path.isdir(output):
            shutil.rmtree(output)
        os.rename(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(output: str) -> None:
    """An earlier export may be replaced, anything else may not."""
    if "://" in output:
        raise UserError(f"--output {output}: a URL; exports are written to a local folder so far")
    folder = os.path.expanduser(output)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"--output {output}: there is a file of that name")
    if os.path.isdir(folder) and os.listdir(folder) and not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(f"--output {output}: the folder is not empty and holds no earlier export; choose another")


def _verify(path: str, expected: Mapping[str, np.ndarray]) -> None:
    """Every export is read back: a file that differs from the model must not leave this function."""
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if found[name].tobytes() != tensor.tobytes():
            raise OSError(f"{path}: {name} reads back with other values than were written")
