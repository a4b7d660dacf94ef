"""Every parameter names all its dimensions, and the big matrices are really split, on 8 fake devices."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json, jax
import flax.linen as nn
from lmtrain.hf.key_map import flatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.registry import build_model
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.state import abstract_params, init_state, state_shardings

model = build_model(Gpt2Config(hidden_dim=32, num_heads=4, num_layers=2, seq_len=16), 64)
optimizer = build_optimizer(AdamConfig(), lambda step: 0.1)
boxed = flatten(abstract_params(model))
result = {"names": {path: [list(leaf.names), len(leaf.value.shape)] for path, leaf in boxed.items()}}

def shards(layout):
    _, shardings = state_shardings(model, optimizer, layout, "float32")
    params = init_state(model, optimizer, layout, shardings, seed=0, dtype="float32").params
    return {
        path: [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)] for path, leaf in flatten(params).items()
    }

result["fsdp"] = shards(plan_layout(PartitioningConfig()))
result["tensor"] = shards(plan_layout(PartitioningConfig(model_axis_size=4, tensor_parallel_axes=["mlp", "heads"])))
result["none"] = shards(plan_layout(PartitioningConfig(fsdp_axis=None)))
print(json.dumps(result))
"""

MATRICES = ["attn/qkv/kernel", "attn/out/kernel", "mlp/up/kernel", "mlp/down/kernel"]


@pytest.fixture(scope="module")
def found():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | flags
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parts(shapes) -> list[int]:
    """Into how many parts each dimension is split."""
    whole, local = shapes
    return [size // part for size, part in zip(whole, local, strict=True)]


def test_every_parameter_names_each_of_its_dimensions_with_a_known_word(found):
    from lmtrain.sharding.axes import PARAMETER_AXES

    assert len(found["names"]) == 16
    for path, (names, rank) in found["names"].items():
        assert len(names) == rank, path
        assert set(names) <= set(PARAMETER_AXES), path


@pytest.mark.parametrize("matrix", [*[f"blocks/{m}" for m in MATRICES], "tokens/embedding", "positions/embedding"])
def test_fsdp_splits_every_matrix_over_all_devices(found, matrix):
    names, _ = found["names"][matrix]
    assert parts(found["fsdp"][matrix]) == [8 if name == "embed" else 1 for name in names]


@pytest.mark.parametrize("matrix", MATRICES)
def test_tensor_parallelism_splits_mlp_and_heads_by_4_and_fsdp_the_rest_by_2(found, matrix):
    names, _ = found["names"][f"blocks/{matrix}"]
    ways = {"embed": 2, "mlp": 4, "heads": 4}
    assert parts(found["tensor"][f"blocks/{matrix}"]) == [ways.get(name, 1) for name in names]


def test_without_any_axis_everything_is_whole_everywhere(found):
    assert all(whole == local for whole, local in found["none"].values())
