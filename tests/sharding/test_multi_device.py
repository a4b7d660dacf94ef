"""Eight fake devices compute what one does, in one process of their own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.multi_device

SCRIPT = """
import json, sys
import jax
import numpy as np
import optax
from lmtrain.hf.key_map import flatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.registry import build_model
from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.schedules import build_schedule
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.sharding.placement import local_rows, place_batch
from lmtrain.train.state import init_state, state_shardings
from lmtrain.train.step import build_train_step

model = build_model(Gpt2Config(hidden_dim=16, num_heads=2, num_layers=2, seq_len=8, initializer_range=0.2), 32)
config = AdamConfig(learning_rate=1e-2, warmup=0, weight_decay=0.1)
schedule = build_schedule(config, 100)
optimizer = build_optimizer(config, schedule)
devices = jax.devices()

def batch(step):
    rng = np.random.default_rng(step)
    mask = rng.random((16, 8)) < 0.7
    mask[:, -1] = False
    return {"tokens": rng.integers(0, 32, (16, 8)).astype(np.int32), "loss_mask": mask}

def train(layout, microbatches=1):
    _, shardings = state_shardings(model, optimizer, layout, "float32")
    state = init_state(model, optimizer, layout, shardings, seed=1, dtype="float32")
    step = build_train_step(
        model, optimizer, schedule, layout, shardings,
        seed=1, compute_dtype="float32", num_microbatches={16: microbatches}, dropout=False,
    )
    rows = local_rows(layout.batch, 16)
    losses = []
    for index in range(5):
        state, metrics = step(state, place_batch(batch(index), layout.batch, rows, 16))
        losses.append(float(metrics["train/loss"]))
    mu, nu = (optax.tree.get(state.optimizer, name) for name in ("mu", "nu"))
    parts = lambda tree: {path: list(leaf.addressable_shards[0].data.shape) for path, leaf in flatten(tree).items()}
    return {"losses": losses, "params": parts(state.params), "mu": parts(mu), "nu": parts(nu)}

def rows_by_device(layout):
    rows = local_rows(layout.batch, 16)
    local = {"tokens": (10 * rows[:, None] + np.arange(3)).astype(np.int32)}
    placed = place_batch(local, layout.batch, rows, 16)["tokens"]
    shards = [[shard.device.id, np.asarray(shard.data).tolist()] for shard in placed.addressable_shards]
    return {"shards": shards, "whole": np.asarray(placed).tolist()}

fsdp = plan_layout(PartitioningConfig())
tensor = plan_layout(PartitioningConfig(model_axis_size=2, tensor_parallel_axes=["mlp", "heads"]))
result = {
    "rows": {"8x1": rows_by_device(fsdp), "4x2": rows_by_device(tensor)},
    "8x1": train(fsdp), "8x1 micro": train(fsdp, 2), "4x2": train(tensor),
}
jax.devices = lambda: devices[:1]
result["one"] = train(plan_layout(PartitioningConfig()))
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def found():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | flags
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("mesh", "shards", "copies"), [("8x1", 8, 1), ("4x2", 4, 2)])
def test_a_batch_is_cut_into_consecutive_rows(found, mesh, shards, copies):
    placed = found["rows"][mesh]
    expected = 10 * np.arange(16)[:, None] + np.arange(3)
    np.testing.assert_array_equal(placed["whole"], expected)
    seen = sorted(rows for _, rows in placed["shards"])
    assert seen == [part.tolist() for part in np.split(expected, shards) for _ in range(copies)]
    assert len({device for device, _ in placed["shards"]}) == 8


@pytest.mark.parametrize("mesh", ["8x1", "8x1 micro", "4x2"])
def test_the_losses_of_five_steps_are_those_of_one_device(found, mesh):
    assert found[mesh]["losses"] == pytest.approx(found["one"]["losses"], rel=1e-5)
    assert len(set(found["one"]["losses"])) == 5


@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_optimizer_moments_are_split_like_parameters(found, mesh):
    assert found[mesh]["mu"] == found[mesh]["params"]
    assert found[mesh]["nu"] == found[mesh]["params"]
    assert found[mesh]["mu"]["blocks/mlp/up/kernel"] == {"8x1": [2, 2, 64], "4x2": [2, 4, 32]}[mesh]
