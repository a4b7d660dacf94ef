"""Exports of the variants, and their models in transformers."""

import pytest

from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout


@pytest.fixture(scope="session")
def layout():
    return build_layout(PartitioningConfig())


@pytest.fixture
def export(tmp_path, layout):
    """`export(variant)` writes an export as `lmtrain export-hf` does, and returns its path."""
    from parity.variants import TOKENIZER

    from lmtrain.weights.load_checkpoint import gather_tensors
    from lmtrain.weights.write_export import build_export, write_export

    def write(variant, dtype="float32", folder="hf", **options):
        plan = build_export(variant.config, variant.model, TOKENIZER, dtype)
        tensors = gather_tensors(variant.params, plan.pieces, layout, variant.model.vocab_size)
        write_export(str(tmp_path / folder), plan, tensors, **options)
        return str(tmp_path / folder)

    return write


@pytest.fixture
def in_torch(export, tmp_path, monkeypatch):
    """`in_torch(variant)` exports and loads in transformers, which must find every tensor it expects."""
    import torch
    import transformers.dynamic_module_utils
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def load(variant):
        model, loading = AutoModelForCausalLM.from_pretrained(
            export(variant),
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
            trust_remote_code=True,
        )
        assert not any(loading.values()), loading
        return model.eval()

    return load
