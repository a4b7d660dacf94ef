"""Matrix of mesh, accumulation, remat, scan and precision: equal losses, and no unnecessary collectives or copies."""

import json
from pathlib import Path

import numpy as np
import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device

SCRIPT = Path(__file__).with_name("train_on_meshes.py")

TENSOR = {"tensor_parallel_axes": ["mlp", "heads", "vocab"]}
ADAPTERS = {"r": 4, "alpha": 16, "modules_to_save": ["lm_head"]}
ONE = {"name": "one", "devices": 1}
BOTH = {"model_axis_size": 2, **TENSOR}
MESHES = {"fsdp and tensor": BOTH, "fsdp, accumulating": {"per_device_parallelism": 1}}
MORE = {
    "data": {"fsdp_axis": None},
    "fsdp": {},
    "tensor": {"fsdp_axis": None, "model_axis_size": 4, **TENSOR},
    "replicas": {"replica_ici_axis_size": 2, "model_axis_size": 2, **TENSOR},
    "sequence": {"model_axis_size": 2, "compute_axis_resources": {"position": "model"}},
    "advanced": {
        "fsdp_axis": None,
        "model_axis_size": 2,
        "axis_resources": {"mlp": "model"},
        "parameter_axis_resources": {"embed": ["replica", "data"], "vocab": "model"},
        "compute_axis_resources": {"batch": ["replica", "data"], "heads": "model"},
    },
}


def train(folder, cases):
    output = folder / "found.json"
    run_script(
        SCRIPT.read_text(), output, *map(json.dumps, cases), folder=folder, seconds=500, XLA_FLAGS=fake_devices(8)
    )
    return json.loads(output.read_text())


def losses_on(folder, meshes, common, *others, rtol=1e-5):
    """Train on one device and on every mesh, and check that their losses are equal. `others` are more cases."""
    cases = [{"name": name, "trainer": trainer, **common} for name, trainer in meshes.items()]
    results = train(folder, [{**ONE, **common}, *others, *cases])
    losses = {name: result["losses"] for name, result in results.items()}
    for name in meshes:
        np.testing.assert_allclose(losses[name], losses["one"], rtol=rtol, err_msg=name)
    return losses


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
    cases = [{"name": name, "steps": 8, "trainer": trainer, "inspect": True} for name, trainer in MESHES.items()]
    # at 3e-2 Adam makes roundings of 1e-7 in the gradients of adapters 1e-5 in the losses
    lora = {"steps": 6, "optimizer": {"learning_rate": 1e-2}}
    lora["lora"] = {**ADAPTERS, "dropout": 0.3, "base_dtype": "bfloat16", "base_quantization": "nf4"}
    cases += [{**ONE, **lora, "name": "lora, one"}, {**lora, "name": "lora", "trainer": BOTH}]
    return train(tmp_path_factory.mktemp("meshes"), [{**ONE, "steps": 8}, *cases])


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_equal_to_those_of_one_device(meshes, mesh):
    one = meshes["one"]["losses"]
    assert one[-1] < 0.95 * one[0]  # the loss decreases
    np.testing.assert_allclose(meshes[mesh]["losses"], one, rtol=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp and tensor", "fsdp, accumulating"])
def test_no_collective_gathers_all_layers(meshes, mesh):
    """FSDP gathers one block at a time, never the stacked blocks, for any number of layers."""
    stacked = [tuple(shape) for path, shape in meshes[mesh]["whole"].items() if path.endswith("kernel")]
    gathers = [shapes for kind, _, shapes in meshes[mesh]["collectives"] if kind == "all-gather"]
    assert gathers
    assert not [shape for shapes in gathers for shape in map(tuple, shapes) if shape in stacked]


@pytest.mark.parametrize(("mesh", "parts"), [("fsdp, accumulating", 8), ("fsdp and tensor", 8)])
def test_every_matrix_of_the_optimizer_state_is_split_over_all_devices(meshes, mesh, parts):
    leaves = [leaf for leaf in meshes[mesh]["optimizer"] if "kernel" in leaf[0]]
    assert len(leaves) >= 8
    assert {size // held for _, size, held in leaves} == {parts}


def test_microbatches_are_split_without_moving_rows(meshes):
    """Splitting a sharded batch into halves would gather it; tokens are the only two-dimensional int32 arrays."""
    for kind, _, shapes in meshes["fsdp, accumulating"]["collectives"]:
        assert not (kind == "all-gather" and [16, 16] in shapes)


@pytest.mark.long
def test_fifty_losses_on_all_meshes_and_mappings_are_equal_to_those_of_one_device(tmp_path):
    """With positions that restart: learned ones are looked up in a split table."""
    common, through = {"steps": 50, "data": {"reset_positions": True}}, {**ONE, "steps": 3, "name": "through"}
    losses = losses_on(tmp_path, MORE, common, through)
    assert losses["one"][-1] < 0.6 * losses["one"][0]
    assert losses["one"][0] != losses["through"][0]


DATA, FSDP, BOTH = {"fsdp_axis": None}, {}, {"model_axis_size": 2, **TENSOR}
HALF = "p=f32,c=bf16"
# Pairwise coverage: each value of each choice with each value of every other choice.
CHOICES = [
    (DATA, -1, True, True, "f32"),
    (DATA, 1, False, False, HALF),
    (DATA, 1, "dots", True, "f32"),
    (DATA, -1, "dots", False, HALF),
    (FSDP, 1, True, False, "f32"),
    (FSDP, -1, False, True, HALF),
    (FSDP, -1, "dots", False, "f32"),
    (BOTH, 1, True, True, HALF),
    (BOTH, -1, False, False, "f32"),
    (BOTH, 1, "dots", True, HALF),
]


@pytest.mark.long
def test_execution_choices_give_equal_losses(tmp_path):
    """Mesh, accumulation, remat, scan and precision: five steps in float32 within 1e-5 of one device, with bfloat16
    computation within 2 %."""
    cases = [
        {
            "name": str(number),
            "steps": 5,
            "trainer": {**mesh, "per_device_parallelism": micro, "mp": mp},
            "model": {"gradient_checkpointing": remat, "scan_layers": scan},
        }
        for number, (mesh, micro, remat, scan, mp) in enumerate(CHOICES)
    ]
    found = train(tmp_path, [{**ONE, "steps": 5}, *cases])
    one = found["one"]["losses"]
    for number, choice in enumerate(CHOICES):
        tolerance = 1e-5 if choice[-1] == "f32" else 2e-2
        np.testing.assert_allclose(found[str(number)]["losses"], one, rtol=tolerance, err_msg=str(choice))


@pytest.mark.long
def test_rotary_positions_that_restart_do_not_depend_on_the_mesh(tmp_path):
    """They matter only for attention across documents."""
    apart = {"mask_across_documents": False}
    llama = {"steps": 5, "model": {"type": "llama"}, "data": {"reset_positions": True, **apart}}
    losses = losses_on(tmp_path, MESHES, llama, {**ONE, **llama, "name": "through", "data": apart})
    assert losses["one"][0] != losses["through"][0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "mesh", "steps", "decrease", "rtol"),
    [
        # with split vocabulary, split batch and replicas, over two Hessian estimates
        ({"type": "sophia-g", "learning_rate": 3e-3, "update_interval": 3}, BOTH, 6, 1, 1e-4),
        ({"type": "sophia-h", "learning_rate": 3e-3, "update_interval": 3}, BOTH, 6, 1, 1e-4),
        # also with fewer matrices than devices: 2 layers, 6 matrices in qkv, 8 devices
        ({"type": "muon", "learning_rate": 2e-2}, FSDP, 8, 0.97, 1e-5),
    ],
    ids=lambda value: value.get("type", "") if isinstance(value, dict) else "",
)
def test_optimizers_do_not_depend_on_the_mesh(tmp_path, optimizer, mesh, steps, decrease, rtol):
    common = {"steps": steps, "optimizer": {**optimizer, "warmup": 0}}
    one = losses_on(tmp_path, {"one mesh": mesh, "replicas": MORE["replicas"]}, common, rtol=rtol)["one"]
    assert one[-1] < decrease * one[0]


@pytest.mark.long
def test_smoothed_and_weighted_losses_do_not_depend_on_the_mesh(tmp_path):
    """Also with a split vocabulary of which one part has padding."""
    sources = {"configs": {"a": {"train_urls": ["a.jsonl"]}, "b": {"train_urls": ["b.jsonl"]}}}
    smoothed = {"type": "weighted_cross_entropy", "label_smoothing": 0.2, "source_weights": {"a": 2.0}}
    common = {"steps": 6, "tokens": 61, "data": sources, "objective": smoothed, "z_loss_weight": 1e-2}
    plain = {**ONE, **common, "name": "plain", "objective": {}}
    losses = losses_on(tmp_path, {**MESHES, "replicas": MORE["replicas"]}, common, plain)
    one = losses["one"]
    assert one[-1] < one[0]
    assert abs(one[0] - losses["plain"][0]) > 1e-3


def test_lora_with_dropout_on_a_base_in_4_bits_does_not_depend_on_the_mesh(meshes):
    one = meshes["lora, one"]["losses"]
    assert one[-1] < 0.99 * one[0]
    np.testing.assert_allclose(meshes["lora"]["losses"], one, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "meshes"),
    [
        ("gpt2", {"both": BOTH, "accumulating": MESHES["fsdp, accumulating"]}),
        ("llama", {"accumulating": MESHES["fsdp, accumulating"], "replicas": MORE["replicas"]}),
        ("mpt", {"both": BOTH}),
        ("backpack", {"replicas": MORE["replicas"]}),
    ],
    ids=["gpt2", "llama", "mpt", "backpack"],
)
def test_lora_does_not_depend_on_the_mesh_and_accumulation(tmp_path, family, meshes):
    lora = {"steps": 6, "optimizer": {"learning_rate": 1e-2}, "lora": ADAPTERS, "model": {"type": family}}
    if family in ("llama", "mpt"):
        lora["lora"] = ADAPTERS | {"base_quantization": {"llama": "int8", "mpt": "int4"}[family]}
    dropout = {**ONE, **lora, "lora": {**ADAPTERS, "dropout": 0.3}, "name": "dropout"}
    losses = losses_on(tmp_path, meshes, lora, *([dropout] if family == "gpt2" else []))
    one = losses["one"]
    assert one[-1] < 0.99 * one[0]
    assert family != "gpt2" or abs(losses["dropout"][-1] - one[-1]) > 1e-5
