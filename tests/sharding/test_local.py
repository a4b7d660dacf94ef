"""Code for each device's shard: on one device it is the code itself."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import fake_devices, run_script
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


STAGES = """
import json, sys
import jax, numpy as np
from jax.sharding import PartitionSpec
from lmtrain.sharding import local
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

x = np.random.default_rng(0).normal(size=(16, 3, 32)).astype(np.float32)
local.platform = lambda: "tpu"
with build_layout(PartitioningConfig(context_axis_size=2)).active():
    names = ("data", "context")
    spec = PartitionSpec(None, names)
    run = jax.jit(local.per_device(lambda x: local.scatter_sum(x[0], names, 1), (PartitionSpec(names),), spec))
    found = {"sum": np.asarray(run(x)).tolist(), "scatters": run.lower(x).compile().as_text().count("reduce-scatter(")}
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.multi_device
def test_on_many_tpus_a_sum_is_scattered_in_two_stages(tmp_path):
    output = tmp_path / "found.json"
    run_script(STAGES, output, folder=tmp_path, seconds=200, XLA_FLAGS=fake_devices(16))
    found = json.loads(output.read_text())
    expected = np.random.default_rng(0).normal(size=(16, 3, 32)).astype(np.float32).sum(0)
    np.testing.assert_allclose(found["sum"], expected, rtol=1e-5, atol=1e-5)
    assert found["scatters"] == 2
