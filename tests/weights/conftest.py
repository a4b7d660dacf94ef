"""A folder of tensors, and what is logged."""

import logging

import numpy as np
import pytest
from safetensors.numpy import save_file
from weights.hf_files import WEIGHTS

from lmtrain.runtime.logging import log


@pytest.fixture
def folder(tmp_path):
    """`folder(tensors)` writes them and returns the path."""

    def write(tensors) -> str:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
        return str(tmp_path)

    return write


@pytest.fixture
def logged(caplog):
    """What lmtrain logs, as a list of lines."""
    before = log.level
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)
    yield lambda: list(dict.fromkeys(caplog.messages))
    log.removeHandler(caplog.handler)
    log.setLevel(before)
