"""Weights in MXFP4 are read as the numbers of transformers, bit for bit, and other contents are refused."""

import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmtrain.hf.weight_files import open_weights
from lmtrain.runtime.errors import UserError


def write(folder, **changes):
    rng = np.random.default_rng(0)
    # every byte, and every scale with which all numbers are finite
    bytes_of = rng.permutation(np.arange(3 * 5 * 64 * 16) % 256).astype(np.uint8)
    scales = rng.permutation(np.arange(3 * 5 * 64) % 253).astype(np.uint8)
    tensors = {"e_blocks": bytes_of.reshape(3, 5, 64, 16), "e_scales": scales.reshape(3, 5, 64)}
    tensors |= {"bias": np.ones((3, 5), ml_dtypes.bfloat16)} | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")
    return tensors


def test_numbers_are_those_of_transformers(tmp_path):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = write(tmp_path)
    blocks, scales = (torch.from_numpy(stored[f"e_{name}"]) for name in ("blocks", "scales"))
    expected = convert_moe_packed_tensors(blocks, scales).contiguous().view(torch.uint16).numpy()
    weights = open_weights(str(tmp_path))
    assert weights.shapes == {"e": (3, 2048, 5), "bias": (3, 5)}
    assert weights.dtypes == {"e": "bfloat16", "bias": "bfloat16"}
    np.testing.assert_array_equal(weights.read("e").view(np.uint16), expected)
    np.testing.assert_array_equal(weights.read_rows("e", 1, 3).view(np.uint16), expected[1:])
    np.testing.assert_array_equal(weights.read_rows("bias", 0, 2), weights.read("bias")[:2])


def test_other_contents_are_refused(tmp_path):
    one = np.zeros((1, 1, 1, 16), np.uint8)
    for scale in (253, 255):  # 6 * 2 ** 126 is larger than any number of bfloat16
        write(tmp_path, e_blocks=one + 7, e_scales=np.full((1, 1, 1), scale, np.uint8))
        with pytest.raises(UserError, match=r"model\.safetensors: e of expert 0"):
            open_weights(str(tmp_path)).read("e")
    write(tmp_path, e_blocks=one + 1, e_scales=np.full((1, 1, 1), 254, np.uint8))
    assert open_weights(str(tmp_path)).read("e").max() == 2.0**126
    for changes in ({"e_scales": None}, {"e_scales": np.zeros((3, 5, 63), np.uint8)}, {"e_blocks": one.astype(int)}):
        write(tmp_path, **changes)
        with pytest.raises(UserError, match=re.escape("model.safetensors: e_blocks")):
            open_weights(str(tmp_path))
