"""Kernels on a mesh: each device has its own sequences and heads, and the result is that of one device."""

import json

import pytest
from forked import fake_devices, run_script

from lmtrain.models.mixer import describe_split

SCRIPT = """
import json
import jax, numpy as np
from lmtrain.models.attention import splash
from lmtrain.models.attention.attend import alibi_slopes
from lmtrain.models.attention.kernel import self_attend
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.sharding.placement import constrain

rng = np.random.default_rng(0)
q, k, v, d = (rng.normal(size=(8, heads, 128, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
segments = np.sort(rng.integers(0, 3, (8, 128)), axis=1)

def program(kernel, has_slopes=False):
    options = {"slopes": alibi_slopes(4, 8) if has_slopes else None, "window": 50}

    def both(q, k, v, d, segments, sinks):
        q, d = (constrain(x, "act_batch", "act_heads", "act_seq", None) for x in (q, d))
        k, v = (constrain(x, "act_batch", "act_kv_heads", "act_seq", None) for x in (k, v))
        def mix(q, k, v, sinks):
            return self_attend(kernel, q, k, v, 0.3, segments=segments, sinks=sinks, **options)

        mixed, pull = jax.vjp(mix, q, k, v, sinks)
        return mixed, *pull(d)

    return jax.jit(both).trace(q, k, v, d, segments, sinks)

def run(kernel, has_slopes):
    return program(kernel, has_slopes).lower().compile()(q, k, v, d, segments, sinks)

sinks = np.float32([-1, 0.5, 2, 3])
slopes = {"splash": False, "blockwise": False, "xla": False, "triton": True}
alone = {has_slopes: run("xla", has_slopes) for has_slopes in (True, False)}
heads = {"model_axis_size": 2, "tensor_parallel_axes": ["heads", "kv_heads"]}
query_heads = {"model_axis_size": 2, "tensor_parallel_axes": ["heads"]}
more_parts = {"model_axis_size": 4, "tensor_parallel_axes": ["heads"], "axis_resources": {"kv_heads": None}}
split = [{"model_axis_size": size, "compute_axis_resources": {"position": "model"}} for size in (2, 4)]
result = []
cases = [(heads, slopes), (query_heads, ["splash", "blockwise"])]
for config, kernels in cases + [(other, ["triton"]) for other in ({}, more_parts, *split)]:
    layout = build_layout(PartitioningConfig(**config))
    for kernel in kernels:
        with layout.active():
            arrays = run(kernel, slopes[kernel])
        expected = alone[slopes[kernel]]
        errors = [float(abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(arrays, expected, strict=True)]
        result.append([kernel, str(config), max(errors), list(arrays[0].addressable_shards[0].data.shape)])

splash.platform = lambda: "tpu"
with build_layout(PartitioningConfig(**heads)).active():
    text = program("splash").lower(lowering_platforms=("tpu",)).as_text()
print(json.dumps([result, text.count("tpu_custom_call")]))
"""


@pytest.mark.parametrize(
    ("parts", "heads", "numbers"),
    [
        (8, 32, ["8 devices exchange"]),
        (64, 32, ["32 devices exchange", "2 groups gather"]),
        (8, 25, ["8 groups gather"]),
    ],
)
def test_the_log_says_how_a_sequence_is_shared(parts, heads, numbers):
    assert all(number in describe_split(parts, heads) for number in numbers)


@pytest.mark.long
@pytest.mark.multi_device
def test_on_a_mesh_every_kernel_equals_one_device(tmp_path):
    """With key heads split like query heads, with only the query heads split, and with a split sequence."""
    rows, kernels = json.loads(
        run_script(SCRIPT, folder=tmp_path, seconds=900, XLA_FLAGS=fake_devices(8)).splitlines()[-1]
    )
    assert kernels == 3  # for TPUs JAX refuses kernels that it would have to split
    assert len(rows) == 10
    for kernel, config, error, shape in rows:
        assert error < (1e-4 if kernel == "triton" else 1e-5), (kernel, config)
        if "'heads'" in config and "'model_axis_size': 2" in config:
            assert shape == [2, 2, 128, 8], (kernel, config)  # 8 sequences over 4, 4 heads over 2
