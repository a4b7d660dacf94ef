"""The mesh and its two mappings, on one device; sizes that do not divide are errors."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

TENSOR = dict.fromkeys(("mlp", "expert_mlp", "heads", "kv_heads"), "model")


def test_the_mesh_has_the_axes_replica_data_expert_context_model_and_all_devices():
    layout = build_layout(PartitioningConfig())
    assert dict(layout.mesh.shape) == {"replica": 1, "data": jax.device_count(), "expert": 1, "context": 1, "model": 1}
    assert layout.num_batch_shards == jax.device_count()
    assert layout.batch.spec == PartitionSpec(("replica", "data"), None)
    assert layout.rows.spec == PartitionSpec(("replica", "data"))
    assert layout.replicated.spec == PartitionSpec()


@pytest.mark.parametrize(
    ("fsdp", "tensor", "expected"),
    [
        (["embed", "vocab"], None, {"embed": "data", "latent": "data", "expert_embed": "data", "vocab": "data"}),
        (None, [], {}),
        ("embed", ["mlp", "heads"], {"embed": "data", "latent": "data", "expert_embed": "data", **TENSOR}),
    ],
)
def test_only_the_configured_parameter_axes_are_split(fsdp, tensor, expected):
    rules = dict(build_layout(PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)).parameter_rules)
    assert {axis: where for axis, where in rules.items() if where} == expected
    assert {"embed", "mlp", "heads", "vocab", "layers"} <= set(rules)


def test_a_number_of_devices_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"trainer.model_axis_size: 1 device does not divide by 3; it could be 1"):
        build_layout(PartitioningConfig(model_axis_size=3))


@dataclass(frozen=True)
class FakeDevice:
    """The attributes of a device that the layout uses."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "fake"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


SLICES = [FakeDevice(number, number // 4) for number in range(16)]


def tpu_slices(number: int) -> list[FakeDevice]:
    """Slices of v5e 2x2."""
    return [
        FakeDevice(4 * part + chip, part, part, "tpu", "TPU v5 lite", (chip % 2, chip // 2, 0))
        for part in range(number)
        for chip in range(4)
    ]


def gpu_hosts(number: int) -> list[FakeDevice]:
    """Hosts with four GPUs, whose slices are their processes."""
    return [FakeDevice(4 * part + gpu, part, part, "cuda", "NVIDIA H100") for part in range(number) for gpu in range(4)]


@pytest.mark.parametrize(
    ("config", "shape", "slices_of_replicas"),
    [
        ({"replica_dcn_axis_size": -1, "model_axis_size": 2}, (4, 2, 1, 1, 2), [{0}, {1}, {2}, {3}]),
        ({"replica_dcn_axis_size": 2, "replica_ici_axis_size": 2}, (4, 4, 1, 1, 1), [{0}, {1}, {2}, {3}]),
        ({"replica_dcn_axis_size": 2}, (2, 8, 1, 1, 1), [{0, 1}, {2, 3}]),
        ({"replica_ici_axis_size": 2, "model_axis_size": 4}, (2, 2, 1, 1, 4), [{0, 1}, {2, 3}]),
    ],
)
def test_replicas_are_within_slices_where_they_fit(config, shape, slices_of_replicas):
    """The network between slices is slow: only the gradient all-reduce between replicas should use it."""
    mesh = build_layout(PartitioningConfig(**config), SLICES).mesh
    assert tuple(mesh.shape.values()) == shape
    assert [{device.slice_index for device in part.ravel()} for part in mesh.devices] == slices_of_replicas


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"replica_dcn_axis_size": 3}, "replica_dcn_axis_size: 4 slices .* 2 or 4"),
        ({"replica_ici_axis_size": 3}, "replica_ici_axis_size: 16 devices .* 2 or 4"),
        ({"replica_dcn_axis_size": 4, "model_axis_size": 3}, "model_axis_size: 16 devices, 4 left .* 2 or 4"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        build_layout(PartitioningConfig(**config), SLICES)


@pytest.mark.parametrize(
    ("devices", "slices", "replicas", "model"),
    [(tpu_slices, 2, 1, 1), (tpu_slices, 4, 2, 2), (tpu_slices, 4, -1, 1), (gpu_hosts, 4, 1, 2), (gpu_hosts, 2, -1, 2)],
)
def test_only_the_outer_axes_extend_over_slices(devices, slices, replicas, model):
    """Neighbours along `model`, `context` and, as far as possible, `data` are in one slice."""
    config = PartitioningConfig(replica_dcn_axis_size=replicas, model_axis_size=model)
    layout = build_layout(config, devices(slices))
    copies = slices if replicas == -1 else replicas
    assert tuple(layout.mesh.shape.values()) == (copies, 4 * slices // copies // model, 1, 1, model)
    assert sorted(device.id for device in layout.mesh.devices.flat) == list(range(4 * slices))
    groups = layout.mesh.devices.reshape(slices, 4)  # in mesh order, each slice is complete before the next
    assert [{device.slice_index for device in group} for group in groups] == [{number} for number in range(slices)]
    assert layout.slice_ids == tuple(number // 4 for number in range(4 * slices))
    if devices is tpu_slices:
        for group in groups:  # a ring of chips
            for one, other in zip(group, np.roll(group, -1), strict=True):
                assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1


@pytest.mark.parametrize("devices", [tpu_slices, gpu_hosts])
def test_a_sequence_may_extend_over_slices(devices):
    layout = build_layout(PartitioningConfig(context_axis_size=8), devices(2))
    assert tuple(layout.mesh.shape.values()) == (1, 1, 1, 8, 1)
    assert layout.slice_ids == (0,) * 4 + (1,) * 4


def test_products_over_several_slices_are_refused_for_tpus_only():
    config = PartitioningConfig(model_axis_size=8)
    assert build_layout(config, gpu_hosts(2)).mesh.shape["model"] == 8
    with pytest.raises(UserError, match=r"trainer.model_axis_size: 8 devices .* more than one of 2 slices has"):
        build_layout(config, tpu_slices(2))


def test_slices_of_different_sizes_count_as_one():
    layout = build_layout(PartitioningConfig(), gpu_hosts(3)[:10])
    assert set(layout.slice_ids) == {0}


def test_context_parallelism_splits_sequences_and_the_state():
    config = PartitioningConfig(context_axis_size=4, model_axis_size=2, tensor_parallel_axes=["mlp", "heads"])
    assert config.parameter_mapping["embed"] == ("data", "expert", "context")
    assert config.compute_mapping["act_batch"] == ("replica", "data", "expert")
    assert config.compute_mapping["act_seq"] == ("context",)
    assert config.compute_mapping["act_stream"] == ("context", "model")
    assert (config.sequence_parts, config.head_parts) == (4, 2)
    older = PartitioningConfig(model_axis_size=2, compute_axis_resources={"position": "model"})
    assert older.compute_mapping["act_seq"] == ("model",)
    assert (older.sequence_parts, older.head_parts) == (2, 1)


def test_specific_mappings_override_axis_resources_which_apply_to_both():
    layout = build_layout(
        PartitioningConfig(
            axis_resources={"mlp": "model", "vocab": ["model"]},
            parameter_axis_resources={"embed": ["replica", "data"], "vocab": None},
            compute_axis_resources={"position": "model", "batch": "data"},
        )
    )
    parameters = {axis: where for axis, where in layout.parameter_rules if where}
    compute = {axis: where for axis, where in layout.compute_rules if where}
    assert parameters == {
        "embed": ("replica", "data"),
        "latent": ("replica", "data"),
        "expert_embed": ("replica", "data"),
        "mlp": "model",
        "expert_mlp": "model",
    }
    assert compute == {"act_batch": "data"} | dict.fromkeys(("act_seq", "act_stream", "act_mlp", "act_vocab"), "model")
