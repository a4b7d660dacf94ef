"""The kernel for TPUs: interpreted against plain attention, also on a mesh; and the program lowered for a TPU."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import fake_devices

from lmtrain.models.layers.attention import self_attend


def arrays(heads: int, kv_heads: int, length: int, dim: int = 8):
    """Queries, keys, values, and the gradient of the output."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, n, length, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "window", "packed"),
    [(2, 2, 128, None, False), (4, 2, 256, 50, True), (2, 1, 256, 140, True)],
    ids=["plain", "grouped, packed, window in a block", "one key head, packed, window over blocks"],
)
def test_outputs_and_gradients_are_those_of_plain_attention(heads, kv_heads, length, window, packed):
    q, k, v, d = arrays(heads, kv_heads, length)
    segments = jnp.asarray((np.arange(length) >= np.array([[40, 70], [90, 128]])[..., None]).sum(1))

    def run(backend):
        def both(q, k, v, d):
            how = {"segments_BS": segments if packed else None, "window": window, "block_size": 128}
            mixed, pull = jax.vjp(lambda *qkv: self_attend(backend, *qkv, 0.3, **how), q, k, v)
            return {"mixed": mixed} | dict(zip(["dq", "dk", "dv"], pull(d), strict=True))

        return jax.jit(both)(q, k, v, d)

    found, expected = run("splash"), run("xla")
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def lowered(length: int, block_size: int | None, dim: int = 64, window: int | None = None) -> str:
    """The gradient's program lowered for a TPU, without running it."""
    q, k = (jax.ShapeDtypeStruct((2, heads, length, dim), jnp.bfloat16) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def loss(q, k, v, segments):
        how = {"segments_BS": segments, "window": window, "block_size": block_size}
        return self_attend("splash", q, k, v, 0.3, **how).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, segments)
    return re.sub(r"\\+22", '"', traced.lower(lowering_platforms=("tpu",)).as_text())


@pytest.mark.parametrize(
    ("length", "wish", "block"),
    [(128, None, 128), (640, None, 128), (1024, None, 512), (1024, 16, 128), (1024, 200, 256), (1024, 4096, 1024)],
)
def test_a_tpu_gets_three_kernels_with_blocks_of_multiples_of_128(monkeypatch, length, wish, block):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    text = lowered(length, wish)
    kernels = re.findall(r'kernel_name = "splash_mha_(\w+?)_segmented', text)
    assert sorted(kernels) == ["dkv", "dq", "fwd"]
    assert set(re.findall(r'"block_q": (\d+)', text)) == {str(block)}


@pytest.mark.parametrize(("dim", "window"), [(20, None), (80, 100), (256, 1)])
def test_the_kernels_take_heads_of_any_width_and_windows(monkeypatch, dim, window):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert lowered(256, None, dim, window).count("tpu_custom_call") == 3


SCRIPT = """
import json
import jax, numpy as np
from lmtrain.models.layers import splash
from lmtrain.models.layers.attention import self_attend
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.sharding.placement import constrain

rng = np.random.default_rng(0)
q, k, v, d = (rng.normal(size=(4, heads, 128, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
segments = np.sort(rng.integers(0, 3, (4, 128)), axis=1)

def program(backend):
    def both(q, k, v, d, segments):
        q, d = (constrain(x, "act_batch", "act_heads", "act_seq", None) for x in (q, d))
        k, v = (constrain(x, "act_batch", "act_kv_heads", "act_seq", None) for x in (k, v))
        how = {"segments_BS": segments, "window": 50}
        mixed, pull = jax.vjp(lambda *qkv: self_attend(backend, *qkv, 0.3, **how), q, k, v)
        return mixed, *pull(d)

    return jax.jit(both).trace(q, k, v, d, segments)

def run(backend):
    return program(backend).lower().compile()(q, k, v, d, segments)

alone = run("xla")
result = {}
for axes, backends in ((["heads", "kv_heads"], ["splash", "blockwise", "xla"]), (["heads"], ["splash", "blockwise"])):
    layout = plan_layout(PartitioningConfig(model_axis_size=2, tensor_parallel_axes=axes))
    assert dict(layout.mesh.shape) == {"replica": 1, "data": 4, "model": 2}
    for backend in backends:
        with layout.active():
            found = run(backend)
        errors = [float(abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(found, alone, strict=True)]
        result[f"{backend} {' '.join(axes)}"] = [errors, list(found[0].addressable_shards[0].data.shape)]

splash.platform = lambda: "tpu"
with layout.active():
    text = program("splash").lower(lowering_platforms=("tpu",)).as_text()
print(json.dumps([result, text.count("tpu_custom_call")]))
"""


@pytest.mark.long
@pytest.mark.multi_device
def test_on_a_mesh_every_backend_equals_one_device():
    """With key heads split like query heads, and with only the query heads split."""
    environment = os.environ | {"XLA_FLAGS": fake_devices(8)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, kernels = json.loads(done.stdout)
    assert kernels == 3  # for TPUs JAX refuses kernels that it would have to split
    assert len(found) == 5
    for name, (errors, shape) in found.items():
        assert max(errors) < 1e-5, name
        assert shape == [1, 2, 128, 8], name  # 4 sequences over 4, 4 heads over 2
