"""The check of an export against transformers: what agrees, what differs, and what must be installed."""

import importlib.util

import numpy as np
import pytest
from parity.variants import TOKENIZER, make

from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.compare_export import build_logits, compare_logits, require_torch
from lmtrain.weights.load_checkpoint import gather_tensors
from lmtrain.weights.write_export import build_export, write_export

LAYOUT = build_layout(PartitioningConfig())


def test_an_export_agrees_with_its_model_and_not_with_another(tmp_path):
    variant, folder = make("gpt2", num_layers=1), str(tmp_path / "hf")
    export = build_export(variant.config, variant.model, TOKENIZER, "float32")
    write_export(folder, export, gather_tensors(variant.params, export.pieces, LAYOUT, variant.model.vocab_size))
    ours = build_logits(variant.model, variant.params, LAYOUT)
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_allclose(ours(tokens), variant.logits(tokens), rtol=1e-5, atol=1e-5)
    assert "logits agree with transformers' within " in compare_logits(folder, ours, 24, "float32")

    def worse(by):
        return lambda tokens: ours(tokens) + by * (np.arange(90) == 7)

    compare_logits(folder, worse(0.01), 24, "bfloat16")  # within the rounding of the weights in the file
    for by, dtype in ((0.01, "float32"), (1.0, "bfloat16")):
        with pytest.raises(UserError, match="logits differ"):
            compare_logits(folder, worse(by), 24, dtype)


@pytest.mark.parametrize(("missing", "with_peft"), [("torch", False), ("peft", True)])
def test_what_must_be_installed_is_named(monkeypatch, missing, with_peft):
    require_torch(with_peft)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(UserError, match=f"pip install {missing}"):
        require_torch(with_peft)
