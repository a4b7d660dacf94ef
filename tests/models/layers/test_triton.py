"""The kernels for NVIDIA GPUs: interpreted against plain attention, also on a mesh. Compiled: tests/compiled/."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import fake_devices

from lmtrain.models.layers.attention import alibi_slopes, self_attend
from lmtrain.models.layers.triton import attention, blocks

BATCH = 2


def arrays(heads, kv_heads, length, width, columns):
    """Queries, keys, values, and the gradient of the output."""
    rng = np.random.default_rng(0)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, columns), (heads, columns)]
    return [rng.normal(size=(BATCH, number, length, dim)).astype(np.float32) for number, dim in sizes]


def compare(heads, kv_heads, length, width, columns=None, ends=(), **how):
    q, k, v, d = arrays(heads, kv_heads, length, width, columns or width)
    segments = (np.arange(length) >= np.array(ends)[..., None]).sum(1) if ends else None

    def run(backend):
        def both(q, k, v, d):
            mixed, pull = jax.vjp(lambda *qkv: self_attend(backend, *qkv, 0.3, segments_BS=segments, **how), q, k, v)
            return {"mixed": mixed} | dict(zip(["dq", "dk", "dv"], pull(d), strict=True))

        return jax.jit(both)(q, k, v, d)

    found, expected = run("triton"), run("xla")
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=5e-5, err_msg=name)


ENDS = [[40, 70, 200], [90, 128, 129]]


SUITE = [
    {"heads": 2, "kv_heads": 1, "length": 300, "width": 16, "window": 100, "ends": ENDS},
    {"heads": 4, "kv_heads": 2, "length": 256, "width": 8, "ends": ENDS, "slopes": alibi_slopes(4, 8)},
    {"heads": 2, "kv_heads": 2, "length": 200, "width": 12, "columns": 384, "ends": ENDS},
]
LONG = [
    {"heads": 1, "kv_heads": 1, "length": 256, "width": 64},
    {"heads": 6, "kv_heads": 2, "length": 130, "width": 80, "window": 1},
    {"heads": 3, "kv_heads": 3, "length": 256, "width": 8, "ends": ENDS, "slopes": alibi_slopes(3, 8)},
    {"heads": 1, "kv_heads": 1, "length": 128, "width": 256, "ends": ENDS, "upcast": True},
    {"heads": 1, "kv_heads": 1, "length": 100, "width": 16, "columns": 100},
]


@pytest.mark.parametrize(
    "case",
    [*SUITE, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)],
    ids=lambda case: ", ".join(f"{name} {value}" for name, value in case.items() if name not in ("ends", "slopes")),
)
def test_outputs_and_gradients_are_those_of_plain_attention(case):
    """Partial blocks, grouped heads, windows, documents, ALiBi, heads of odd widths, wide values."""
    compare(**case)


@pytest.mark.long
def test_every_block_size_gives_the_same_result(monkeypatch):
    """With documents that end in the middle of a block, at its edge, and one position from it."""
    for found in {*blocks.SMALL.values(), *blocks.LARGE.values()}:
        monkeypatch.setattr(blocks, "SMALL", dict.fromkeys((64, 128, 256), found))
        compare(2, 1, 384, 16, ends=[[127, 128, 129, 300], [1, 64, 256, 320]])


def test_ranges_are_documents_and_windows():
    segments = jnp.array([[0, 0, 0, 5, 5, 2, 2, 2]])
    first, last = attention._ranges(segments, None)
    assert first.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5]]
    assert last.tolist() == [[2, 2, 2, 4, 4, 7, 7, 7]]
    first, last = attention._ranges(segments, 2)
    assert first.tolist() == [[0, 0, 1, 3, 3, 5, 5, 6]]
    assert last.tolist() == [[1, 2, 2, 4, 4, 6, 7, 7]]


SCRIPT = """
import json
import jax, numpy as np
from lmtrain.models.layers.attention import self_attend, alibi_slopes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(8, heads, 64, 8)).astype(np.float32) for heads in (4, 2, 2))
segments = (np.arange(64) >= rng.integers(1, 64, (8, 1))).astype(np.int32)
slopes = alibi_slopes(4, 8)
found = {}
for name, config in {
    "batch": {}, "heads": {"model_axis_size": 2, "tensor_parallel_axes": ["heads", "kv_heads"]},
    "query heads alone": {
        "model_axis_size": 4, "tensor_parallel_axes": ["heads"], "axis_resources": {"kv_heads": None}
    },
    "a split sequence": {"model_axis_size": 2, "compute_axis_resources": {"position": "model"}},
    "a split sequence, one key head each": {"model_axis_size": 4, "compute_axis_resources": {"position": "model"}},
}.items():
    with plan_layout(PartitioningConfig(**config)).active():
        def loss(backend):
            def total(q, k, v):
                mixed = self_attend(backend, q, k, v, 0.3, segments_BS=segments, slopes=slopes)
                return (mixed * np.cos(np.arange(8))).sum()
            return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
        one, other = (jax.tree.leaves(loss(backend)) for backend in ("triton", "xla"))
    found[name] = max(float(abs(a - b).max()) for a, b in zip(one, other))
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.multi_device
def test_on_a_mesh_each_device_has_its_own_sequences_and_heads():
    environment = os.environ | {"XLA_FLAGS": fake_devices(8)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 5
    assert max(found.values()) < 1e-4
