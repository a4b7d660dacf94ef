"""On simulated devices: batches are split into consecutive rows, and a sum is scattered in two stages."""

import json

import numpy as np
import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json, sys
import jax, numpy as np
from jax.sharding import PartitionSpec
from lmtrain.sharding import local
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.sharding.placement import LocalPart

def rows_by_device(**settings):
    layout = build_layout(PartitioningConfig(**settings), jax.devices()[:8])
    part = LocalPart.of(layout.batch, 16, 3)
    placed = part.place({"tokens": (10 * part.rows[:, None] + np.arange(3)).astype(np.int32)})["tokens"]
    shards = [[shard.device.id, np.asarray(shard.data).tolist()] for shard in placed.addressable_shards]
    return {"shards": shards, "whole": np.asarray(placed).tolist()}

found = {"8x1": rows_by_device(), "4x2": rows_by_device(model_axis_size=2, tensor_parallel_axes=["mlp", "heads"])}
x = np.random.default_rng(0).normal(size=(16, 3, 32)).astype(np.float32)
local.platform = lambda: "tpu"
with build_layout(PartitioningConfig(context_axis_size=2)).active():
    names = ("data", "context")
    spec = PartitionSpec(None, names)
    run = jax.jit(local.per_device(lambda x: local.scatter_sum(x[0], names, 1), (PartitionSpec(names),), spec))
    found |= {"sum": np.asarray(run(x)).tolist(), "scatters": run.lower(x).compile().as_text().count("reduce-scatter(")}
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    run_script(SCRIPT, folder / "found.json", folder=folder, XLA_FLAGS=fake_devices(16))
    return json.loads((folder / "found.json").read_text())


def test_a_batch_is_split_into_consecutive_rows(found):
    expected = 10 * np.arange(16)[:, None] + np.arange(3)
    for mesh, shards, copies in (("8x1", 8, 1), ("4x2", 4, 2)):
        np.testing.assert_array_equal(found[mesh]["whole"], expected)
        seen = sorted(rows for _, rows in found[mesh]["shards"])
        assert seen == [part.tolist() for part in np.split(expected, shards) for _ in range(copies)]
        assert len({device for device, _ in found[mesh]["shards"]}) == 8


def test_on_many_tpus_a_sum_is_scattered_in_two_stages(found):
    expected = np.random.default_rng(0).normal(size=(16, 3, 32)).astype(np.float32).sum(0)
    np.testing.assert_allclose(found["sum"], expected, rtol=1e-5, atol=1e-5)
    assert found["scatters"] == 2
