"""The tensors of an export, gathered from parameters; with adapters, merged."""

import numpy as np
from lora.exported import Exported
from weights.hf_files import LLAMA, VOCAB, assert_same, tensors_of

from lmtrain.hf.weight_files import open_weights
from lmtrain.lora.model import ADAPTERS, BASE, merge_layer
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_hf import build_hf_pieces, load_hf_params
from lmtrain.weights.write_export import gather_tensors


def test_gathered_tensors_equal_the_stored_ones(folder):
    tensors = tensors_of(LLAMA)
    layout, model = build_layout(PartitioningConfig()), build_model(LLAMA, VOCAB)
    params = load_hf_params(folder(tensors), LLAMA, model, layout, "float32")
    pieces = build_hf_pieces(LLAMA, model)
    gathered = gather_tensors(params, pieces, layout, VOCAB)
    assert_same({piece.name: value for piece, value in zip(pieces, gathered, strict=True)}, tensors)


def test_merged_tensors_have_the_adapters_of_each_layer_and_the_tables_that_were_trained(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    merged, base = (open_weights(str(tmp_path / name)) for name in ("merged", "base"))
    adapters, values = flatten(exported.params[ADAPTERS]), flatten(exported.params[BASE])
    for layer in range(2):
        a, b = (adapters[f"blocks/attn/q/{name}"][layer] for name in ("lora_a", "lora_b"))
        expected = merge_layer(values["blocks/attn/q/kernel"][layer], a, b, exported.model.scale)
        found = merged.read(f"model.layers.{layer}.self_attn.q_proj.weight")
        np.testing.assert_array_equal(found, expected.reshape(16, 16).T)
    size = exported.model.vocab_size
    np.testing.assert_array_equal(merged.read("lm_head.weight"), adapters["unembed/embedding"][:size])
    changed = {name for name in base.shapes if not np.array_equal(merged.read(name), base.read(name))}
    assert changed == {"lm_head.weight", *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2))}
