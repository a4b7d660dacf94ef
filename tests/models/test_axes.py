"""Logical axes of every parameter, and where they put it on 8 (fake) devices."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi_device

# Runs in its own process, because the number of devices is fixed when JAX starts. Prints one JSON object.
PROGRAM = """
import json
import jax, optax
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.registry import build_model
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.state import abstract_params, init_state, state_shardings

config = Gpt2Config(seq_len=16, hidden_dim=32, num_heads=4, num_layers=2, mlp_scale=4)
model = build_model(config, 40)
optimizer = optax.adam(1e-3)
keystr = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
boxed = jax.tree_util.tree_leaves_with_path(abstract_params(model), is_leaf=lambda x: hasattr(x, "names"))
report = {"devices": jax.device_count(), "leaves": {
    keystr(path): [getattr(leaf, "names", None), jax.tree.leaves(leaf)[0].shape] for path, leaf in boxed
}}
for name, layout in {
    "fsdp": plan_layout(1, "embed", None),
    "tensor": plan_layout(4, "embed", ["mlp", "heads"]),
    "replicated": plan_layout(1, None, None),
}.items():
    _, shardings = state_shardings(model, optimizer, layout, "float32")
    state = init_state(model, optimizer, layout, shardings, seed=0, dtype="float32")
    adam = state.optimizer[0]
    report[name] = {"mesh": dict(layout.mesh.shape)} | {
        part: {
            keystr(path): [leaf.addressable_shards[0].data.shape, len({str(s.index) for s in leaf.addressable_shards})]
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for part, tree in {"params": state.params, "mu": adam.mu, "nu": adam.nu}.items()
    }
    report[name]["sum"] = float(sum(abs(leaf).sum() for leaf in jax.tree.leaves(jax.device_get(state.params))))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | flags, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WORDS = {"embed", "heads", "head_dim", "qkv", "mlp", "vocab", "position", "layers"}

# one device's part of each big matrix, [N=2, ...]: D 32, H 4, C 8, F 128, V 40, positions 16
WHOLE = {
    "tokens/embedding": [40, 32],
    "positions/embedding": [16, 32],
    "blocks/attn/qkv/kernel": [2, 32, 3, 4, 8],
    "blocks/attn/out/kernel": [2, 4, 8, 32],
    "blocks/mlp/up/kernel": [2, 32, 128],
    "blocks/mlp/down/kernel": [2, 128, 32],
}
FSDP = {  # D over 8
    "tokens/embedding": [40, 4],
    "positions/embedding": [16, 4],
    "blocks/attn/qkv/kernel": [2, 4, 3, 4, 8],
    "blocks/attn/out/kernel": [2, 4, 8, 4],
    "blocks/mlp/up/kernel": [2, 4, 128],
    "blocks/mlp/down/kernel": [2, 128, 4],
}
TENSOR = {  # D over 2; H and F over 4
    "tokens/embedding": [40, 16],
    "positions/embedding": [16, 16],
    "blocks/attn/qkv/kernel": [2, 16, 3, 1, 8],
    "blocks/attn/out/kernel": [2, 1, 8, 16],
    "blocks/mlp/up/kernel": [2, 16, 32],
    "blocks/mlp/down/kernel": [2, 32, 16],
}


def test_eight_devices_are_there(report):
    assert report["devices"] == 8
    assert report["fsdp"]["mesh"] == {"replica": 1, "data": 8, "model": 1}
    assert report["tensor"]["mesh"] == {"replica": 1, "data": 2, "model": 4}


def test_every_parameter_has_one_known_name_per_dimension(report):
    assert len(report["leaves"]) == 16
    for path, (names, shape) in report["leaves"].items():
        assert names is not None, path
        assert len(names) == len(shape), path
        assert set(names) <= WORDS, path
        assert (names[0] == "layers") == path.startswith("blocks/"), path


@pytest.mark.parametrize("part", ["params", "mu", "nu"])
@pytest.mark.parametrize(
    ("layout", "expected", "distinct"), [("fsdp", FSDP, [8]), ("tensor", TENSOR, [2, 8]), ("replicated", WHOLE, [1])]
)
def test_each_device_holds_its_part_of_the_big_matrices(report, layout, expected, distinct, part):
    found = report[layout][part]
    assert {path: found[path][0] for path in expected} == expected
    # as many distinct parts as devices; the tables have no axis to split over `model`
    for path in expected:
        assert found[path][1] == (distinct[0] if "embedding" in path else distinct[-1]), path


def test_no_device_holds_a_whole_parameter_of_the_residual_width(report):
    for path, (names, shape) in report["leaves"].items():
        share = 8 if "embed" in names else 1
        assert report["fsdp"]["params"][path][0] == [
            size // share if name == "embed" else size for name, size in zip(names, shape, strict=True)
        ], path


def test_initial_values_are_the_same_on_every_mesh(report):
    # a different draw would differ in the third digit; summation order is the host's
    assert report["fsdp"]["sum"] == report["tensor"]["sum"] == report["replicated"]["sum"]
