"""What an export has besides values: pieces, `config.json`, files, settings of the adapters."""

import math

import pytest
from lora.exported import config_of
from parity.variants import TOKENIZER, VOCAB, make

from lmtrain.lora.model import adapt
from lmtrain.models.params import count_parameters
from lmtrain.models.registry import build_model
from lmtrain.weights.export_folder import ModelOrigin
from lmtrain.weights.write_export import build_adapter_export, build_export

ORIGIN = ModelOrigin("one", "data")


@pytest.mark.parametrize(("name", "files"), [("gpt2", set()), ("backpack", {"modeling_backpack.py"})])
def test_an_export_of_a_model_has_every_parameter_and_the_files_of_its_family(name, files):
    variant = make(name)
    export = build_export(variant.config, variant.model, TOKENIZER, "bfloat16", ORIGIN)
    assert export.num_parameters == count_parameters(variant.model)
    assert export.config["model_type"] == variant.kind
    assert (export.config["vocab_size"], export.config["eos_token_id"]) == (VOCAB, TOKENIZER.eos_id)
    assert set(export.extra_files) == files
    assert (export.origin, export.seq_len, export.dtype, export.is_adapter) == (ORIGIN, 24, "bfloat16", False)


def test_an_export_of_adapters_has_their_matrices_tables_and_settings():
    config = config_of("llama", {}, {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"]})
    model = adapt(config.lora, config.model, build_model(config.model, VOCAB))
    export = build_adapter_export(config, model, TOKENIZER, "float32", ORIGIN, "owner/base@main")
    names = {piece.name: math.prod(piece.shape) for piece in export.pieces}
    layers = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "o_proj")]
    expected = {f"{layer}.lora_{part}.weight": 4 * 16 for layer in layers for part in "AB"} | {
        "lm_head.weight": 90 * 16
    }
    assert names == {f"base_model.model.{name}": size for name, size in expected.items()}
    assert export.is_adapter
    assert not export.extra_files
    assert export.config["target_modules"] == ["o_proj", "q_proj"]
    assert (export.config["base_model_name_or_path"], export.config["revision"]) == ("owner/base", "main")
