"""The frozen base of adapters: its dtype, its fingerprint, and which checkpoint it is."""

import json

import ml_dtypes
import numpy as np
import pytest
from lora.exported import Exported
from safetensors.numpy import save_file

from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.weights.load_checkpoint import base_dtype, load_base

ONE, HALF = np.ones(2, np.float32), np.ones(2, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("values", "tensors", "expected"),
    [
        ({"dtype": "float16"}, {"a": ONE}, "float16"),
        ({"torch_dtype": "bfloat16"}, {"a": ONE}, "bfloat16"),
        ({"dtype": "auto"}, {"a": HALF, "counts": np.ones(2, np.int32)}, "bfloat16"),
        ({}, {"a": HALF, "b": ONE}, "float32"),
    ],
)
def test_the_dtype_is_that_of_the_config_or_of_all_stored_weights(tmp_path, values, tensors, expected):
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    assert base_dtype(RunConfig(), str(tmp_path)) == expected


def test_a_base_has_its_dtype_and_a_changed_one_is_refused(tmp_path, caplog):
    exported = Exported(tmp_path, "gpt2", {}, {"base_dtype": "bfloat16"})
    arguments = exported.config, exported.model, exported.layout, str(tmp_path / "base"), exported.tokenizer.identity
    with caplog.at_level("INFO", log.name):
        base = load_base(*arguments)
    digest = base.identity.fingerprint
    assert base.params["norm_final"]["scale"].dtype.name == "bfloat16"
    assert base.run_info == {"initialize_from_hf": str(tmp_path / "base"), "fingerprint": digest}
    assert base.identity == (digest, "bfloat16")
    assert f"bfloat16, frozen; fingerprint {digest[:12]}" in caplog.text
    assert load_base(*arguments, saved=base.run_info).identity == base.identity
    with pytest.raises(UserError, match=rf"has the fingerprint {digest[:12]}, but they were trained on 0000"):
        load_base(*arguments, saved=base.run_info | {"fingerprint": "0" * 32})
