"""A Hugging Face model in a bucket: written, replaced, read."""

import json
import os

import numpy as np
from parity.variants import LLAMA, SIZES, TOKENIZER

from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.hf_config import config_of
from lmtrain.weights.load_hf import load_hf_params
from lmtrain.weights.write_export import build_export, write_export

CONFIG = RunConfig.model_validate({"model": {"type": "llama", **SIZES, **LLAMA}}).model
MODEL = build_model(CONFIG, 90)
PLAN = build_export(CONFIG, MODEL, TOKENIZER, "float32")
TENSORS = [np.random.default_rng(0).normal(size=piece.shape).astype(np.float32) for piece in PLAN.pieces]


def test_an_export_to_a_bucket_equals_one_to_a_folder_and_replaces_an_earlier_one(store, tmp_path):
    write_export(str(tmp_path / "local"), PLAN, TENSORS, shard_bytes=20_000)
    write_export(f"{store.url}/models/one", PLAN, TENSORS)  # in one file, which must be deleted
    write_export(f"{store.url}/models/one", PLAN, TENSORS, shard_bytes=20_000)
    expected = {f"one/{name}": (tmp_path / "local" / name).read_bytes() for name in os.listdir(tmp_path / "local")}
    assert store.contents("models") == expected
    assert len(json.loads(expected["one/model.safetensors.index.json"])["weight_map"]) == len(PLAN.pieces)


def test_a_model_in_a_bucket_is_imported(store):
    url = f"{store.url}/read"
    write_export(url, PLAN, TENSORS, shard_bytes=20_000)
    config = config_of(url).model
    assert config.meaning() == CONFIG.meaning()
    params = flatten(load_hf_params(url, config, MODEL, build_layout(PartitioningConfig()), "float32"))
    names = [piece.name for piece in PLAN.pieces]
    expected = TENSORS[names.index("model.layers.1.mlp.up_proj.weight")]
    np.testing.assert_array_equal(np.asarray(params["blocks/mlp/up/kernel"])[1].T, expected)
