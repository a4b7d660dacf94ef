"""Code for each device's shard: on one device it is the code itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.local import num_parts, per_device, platform, scatter_sum, split_over, sum_over
from lmtrain.sharding.mesh import Layout, build_layout


@pytest.mark.parametrize(
    ("axis", "expected"),
    [("embed", ("data",)), ("mlp", ("model",)), ("act_batch", ("data",)), ("act_mlp", ("model",)), ("layers", ())],
)
def test_an_axis_is_split_over_the_mesh_axes_with_several_devices(axis, expected):
    plan = build_layout(PartitioningConfig(tensor_parallel_axes=["mlp"]))
    assert split_over(axis) == ()
    many = Layout(
        mesh=AbstractMesh((1, 4, 1, 1, 2), plan.mesh.axis_names),
        parameter_rules=plan.parameter_rules,
        compute_rules=plan.compute_rules,
    )
    with jax.sharding.use_abstract_mesh(many.mesh), nn.logical_axis_rules([*many.compute_rules, *many.parameter_rules]):
        assert split_over(axis) == expected
        assert num_parts(("data", "model")) == 8


def test_on_one_device_the_function_is_unchanged_and_sums_are_the_values():
    def double(x):
        return scatter_sum(sum_over((), 2 * x), (), 0)

    assert per_device(double, (PartitionSpec(),), PartitionSpec()) is double
    np.testing.assert_array_equal(double(jnp.arange(3)), [0, 2, 4])
    assert platform() == "cpu"
