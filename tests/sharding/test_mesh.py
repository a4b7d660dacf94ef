"""The mesh and its two mappings, on one device; what does not fit is refused."""

import jax
import pytest
from jax.sharding import PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout


def test_the_mesh_has_the_axes_replica_data_model_and_all_devices():
    layout = plan_layout(PartitioningConfig())
    assert dict(layout.mesh.shape) == {"replica": 1, "data": jax.device_count(), "model": 1}
    assert layout.num_batch_shards == jax.device_count()
    assert layout.batch.spec == PartitionSpec(("replica", "data"))
    assert layout.replicated.spec == PartitionSpec()


@pytest.mark.parametrize(
    ("fsdp", "tensor", "expected"),
    [
        ("embed", None, {"embed": "data"}),
        (["embed", "vocab"], None, {"embed": "data", "vocab": "data"}),
        (None, None, {}),
        ([], [], {}),
        ("embed", ["mlp", "heads"], {"embed": "data", "mlp": "model", "heads": "model"}),
    ],
)
def test_parameters_are_split_as_asked_and_nothing_else(fsdp, tensor, expected):
    rules = dict(plan_layout(PartitioningConfig(fsdp_axis=fsdp, tensor_parallel_axes=tensor)).parameter_rules)
    assert {axis: where for axis, where in rules.items() if where} == expected
    assert {"embed", "mlp", "heads", "vocab", "layers"} <= set(rules)


def test_activations_follow_tensor_parallel_axes_but_keep_the_residual_stream_whole():
    rules = dict(plan_layout(PartitioningConfig(tensor_parallel_axes=["mlp", "heads", "vocab"])).compute_rules)
    split = {axis: where for axis, where in rules.items() if where}
    assert split == {
        "act_batch": ("replica", "data"),
        "act_mlp": "model",
        "act_heads": "model",
        "act_vocab": "model",
    }


def test_a_number_of_devices_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"trainer.model_axis_size: 1 devices do not divide by 3; it could be 1"):
        plan_layout(PartitioningConfig(model_axis_size=3))
