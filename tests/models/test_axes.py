"""Every parameter names all its dimensions, and the big matrices are really split, on 8 fake devices."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json, jax, sys
import flax.linen as nn
from lmtrain.hf.key_map import flatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.registry import build_model
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.state import abstract_params, init_state, state_shardings

SIZES = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": 16}
FAMILIES = {
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, intermediate_dim=64, qk_norm="all", use_bias=True, use_mlp_bias=True),
}
model = build_model(FAMILIES[sys.argv[1]], 64)
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
tensor = PartitioningConfig(model_axis_size=4, tensor_parallel_axes=["mlp", "heads", "kv_heads"])
result["tensor"] = shards(plan_layout(tensor))
result["none"] = shards(plan_layout(PartitioningConfig(fsdp_axis=None)))
print(json.dumps(result))
"""

EMBEDDINGS = {"gpt2": ["tokens", "positions"], "llama": ["tokens", "unembed"]}
PARAMETERS = {"gpt2": 16, "llama": 21}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def found(request):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | flags
    command = [sys.executable, "-c", SCRIPT, request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"family": request.param}


def matrices(found) -> list[str]:
    """The paths of all matrices of the blocks: more than one dimension besides the layer's."""
    return [path for path, (names, _) in found["names"].items() if path.endswith("kernel")]


def parts(shapes) -> list[int]:
    """Into how many parts each dimension is split."""
    whole, local = shapes
    return [size // part for size, part in zip(whole, local, strict=True)]


def test_every_parameter_names_each_of_its_dimensions_with_a_known_word(found):
    from lmtrain.sharding.axes import PARAMETER_AXES

    assert len(found["names"]) == PARAMETERS[found["family"]]
    for path, (names, rank) in found["names"].items():
        assert len(names) == rank, path
        assert set(names) <= set(PARAMETER_AXES), path


def test_fsdp_splits_every_matrix_over_all_devices(found):
    tables = [f"{name}/embedding" for name in EMBEDDINGS[found["family"]]]
    assert len(matrices(found)) >= 4
    for path in [*matrices(found), *tables]:
        names, _ = found["names"][path]
        assert parts(found["fsdp"][path]) == [8 if name == "embed" else 1 for name in names], path


def test_tensor_parallelism_splits_mlp_and_heads_by_4_and_fsdp_the_rest_by_2(found):
    ways = {"embed": 2, "mlp": 4, "heads": 4, "kv_heads": 4}
    for path in matrices(found):
        names, _ = found["names"][path]
        assert parts(found["tensor"][path]) == [ways.get(name, 1) for name in names], path
        assert max(parts(found["tensor"][path])) == 4, path


def test_without_any_axis_everything_is_whole_everywhere(found):
    assert all(whole == local for whole, local in found["none"].values())
