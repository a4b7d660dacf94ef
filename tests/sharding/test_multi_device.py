"""A batch on eight simulated devices, in a subprocess."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from forked import fake_devices

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json
import numpy as np
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.sharding.placement import LocalPart

def rows_by_device(layout):
    part = LocalPart.of(layout.batch, 16, 3)
    local = {"tokens": (10 * part.rows[:, None] + np.arange(3)).astype(np.int32)}
    placed = part.place(local)["tokens"]
    shards = [[shard.device.id, np.asarray(shard.data).tolist()] for shard in placed.addressable_shards]
    return {"shards": shards, "whole": np.asarray(placed).tolist()}

fsdp = build_layout(PartitioningConfig())
tensor = build_layout(PartitioningConfig(model_axis_size=2, tensor_parallel_axes=["mlp", "heads"]))
print(json.dumps({"8x1": rows_by_device(fsdp), "4x2": rows_by_device(tensor)}))
"""


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {"XLA_FLAGS": fake_devices(8)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("mesh", "shards", "copies"), [("8x1", 8, 1), ("4x2", 4, 2)])
def test_a_batch_is_split_into_consecutive_rows(found, mesh, shards, copies):
    placed = found[mesh]
    expected = 10 * np.arange(16)[:, None] + np.arange(3)
    np.testing.assert_array_equal(placed["whole"], expected)
    seen = sorted(rows for _, rows in placed["shards"])
    assert seen == [part.tolist() for part in np.split(expected, shards) for _ in range(copies)]
    assert len({device for device, _ in placed["shards"]}) == 8
