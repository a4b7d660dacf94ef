"""Every parameter names all its dimensions, and large matrices are split over 8 fake devices."""

import json

import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json, sys, jax
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.registry import build_model
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.models.params import abstract_params, flatten
from lmtrain.train.step.state import init_state, state_shardings

SIZES = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": 16}
FAMILIES = {
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, intermediate_dim=64, qk_norm="all", use_bias=True, use_mlp_bias=True),
    "mpt": MptConfig(**SIZES, use_bias=True, tie_word_embeddings=False),
    "backpack": BackpackConfig(**SIZES, num_senses=8),
}
optimizer = build_optimizer(AdamConfig(), lambda step: 0.1)
def plan(model, **partitioning):
    layout = build_layout(PartitioningConfig(**partitioning))
    return layout, *state_shardings(model, optimizer, layout, "float32")

def planned(model, **partitioning):
    # path -> [full shape, shape on one device]
    _, state, shardings = plan(model, **partitioning)
    whole, split = flatten(state.params), flatten(shardings.params)
    return {path: [list(leaf.shape), list(split[path].shard_shape(leaf.shape))] for path, leaf in whole.items()}

def placed(model, **partitioning):
    # the same for existing arrays
    layout, abstract, shardings = plan(model, **partitioning)
    params = init_state(model, optimizer, abstract, shardings, seed=0).params
    return {
        path: [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)] for path, leaf in flatten(params).items()
    }

PRESETS = json.loads(sys.argv[1])
result = {}
for family, config in FAMILIES.items():
    model = build_model(config, 64)
    boxed = flatten(abstract_params(model))
    result[family] = {"names": {path: [list(leaf.names), len(leaf.value.shape)] for path, leaf in boxed.items()}}
    place = placed if family == "gpt2" else planned  # existing arrays are the same for all
    result[family]["tensor"] = place(model, model_axis_size=4, tensor_parallel_axes=["mlp", "heads", "kv_heads"])
    for preset, partitioning in PRESETS.items():
        result[family][preset] = planned(model, **partitioning)
    result[family]["senses"] = planned(model, model_axis_size=4, tensor_parallel_axes=["senses", "heads"])
print(json.dumps(result))
"""

# name -> settings of partitioning, and the number of parts of each axis of parameters
SPLITS = {
    "data alone": ({"fsdp_axis": None}, {}),
    "fsdp": ({}, {"embed": 8}),
    "replicas over slices": ({"replica_dcn_axis_size": 2}, {"embed": 4}),
    "vocabulary": ({"model_axis_size": 4, "tensor_parallel_axes": "vocab"}, {"embed": 2, "vocab": 4}),
    "advanced": (
        {"model_axis_size": 2, "parameter_axis_resources": {"embed": "model", "mlp": "data"}, "fsdp_axis": None},
        {"embed": 2, "mlp": 4},
    ),
    "both axes on one": (
        {"model_axis_size": 2, "parameter_axis_resources": {"embed": ["data", "model"]}, "fsdp_axis": None},
        {"embed": 8},
    ),
}
PRESETS = {name: settings for name, (settings, _) in SPLITS.items()}

PARAMETERS = {"gpt2": 16, "llama": 21, "mpt": 16, "backpack": 32}


@pytest.fixture(scope="module")
def all_found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axes")
    return json.loads(
        run_script(SCRIPT, json.dumps(PRESETS), folder=folder, XLA_FLAGS=fake_devices(8)).splitlines()[-1]
    )


@pytest.fixture(params=list(PARAMETERS))
def found(all_found, request):
    return all_found[request.param] | {"family": request.param}


def matrices(found) -> list[str]:
    """The paths of all matrices of the blocks, which have more than one dimension in addition to the layers."""
    return [path for path, (names, _) in found["names"].items() if path.endswith("kernel")]


def parts(shapes) -> list[int]:
    """The number of parts of each dimension."""
    whole, local = shapes
    return [size // part for size, part in zip(whole, local, strict=True)]


def test_every_parameter_names_each_of_its_dimensions_with_a_known_axis(found):
    from lmtrain.sharding.axes import PARAMETER_AXES

    assert len(found["names"]) == PARAMETERS[found["family"]]
    for path, (names, rank) in found["names"].items():
        assert len(names) == rank, path
        assert set(names) <= set(PARAMETER_AXES), path


def test_tensor_parallelism_splits_what_it_names_by_4_and_fsdp_the_rest_by_2(found):
    """A Backpack's largest matrix has both mlp and senses, and only one can be split over the same devices."""
    layouts = {"tensor": {"mlp", "heads", "kv_heads"}, "senses": {"senses", "heads", "kv_heads"}}
    for path in matrices(found):
        names, _ = found["names"][path]
        for layout, split in layouts.items():
            expected = [2 if name == "embed" else 4 if name in split else 1 for name in names]
            assert parts(found[layout][path]) == expected, (path, layout)
        assert 4 in parts(found["tensor"][path]) + parts(found["senses"][path]), path


def test_every_parameter_is_split_exactly_as_in_the_mapping(found):
    for preset, (_, expected) in SPLITS.items():
        for path, shapes in found[preset].items():
            names, _ = found["names"][path]
            assert parts(shapes) == [expected.get(name, 1) for name in names], (preset, path)
