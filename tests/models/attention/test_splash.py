"""The kernel for TPUs: interpreted against plain attention, and the program lowered for a TPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from models.attention.compare import SINKS, arrays, assert_plain, latent_arrays

from lmtrain.models.attention import splash
from lmtrain.models.attention.kernel import self_attend


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 2, 128), {}),
        ((4, 2, 256), {"window": 50, "ends": [[40, 70], [90, 128]]}),
        ((2, 1, 256), {"window": 140, "ends": [[40, 70], [90, 128]]}),
        ((2, 1, 200), {"ends": [[40, 70], [90, 150]]}),
        ((2, 2, 30), {"window": 20}),
        ((4, 2, 200), {"cap": 0.8, "window": 50, "ends": [[40, 70], [90, 150]]}),
        ((4, 2, 200), {"sinks": SINKS, "window": 50, "ends": [[40, 170], [90, 150]]}),
        (latent_arrays(2, 500, 128, 16, 32), {"ends": [[40, 470], [90, 150]]}),
        (latent_arrays(3, 300, 128, 16, 32), {"window": 140}),
        (latent_arrays(2, 200, 12, 4, 8), {"ends": [[40, 70], [90, 150]]}),
    ],
    ids=[
        "plain",
        "grouped, packed, window in a block",
        "one key head, packed, window over blocks",
        "padded",
        "short",
        "cap",
        "sinks",
        "latent",
        "latent, window",
        "latent, odd width",
    ],
)
def test_outputs_and_gradients_are_those_of_plain_attention(sizes, options):
    inputs = sizes if isinstance(sizes, list) else arrays(*sizes)
    assert_plain("splash", inputs, rtol=1e-5, atol=1e-5, block_size=128, **options)


def lowered(length: int, block_size: int | None, dim: int = 64, window: int | None = None) -> str:
    """The gradient's program lowered for a TPU, without running it."""
    q, k = (jax.ShapeDtypeStruct((2, heads, length, dim), jnp.bfloat16) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def loss(q, k, v, segments):
        how = {"segments": segments, "window": window, "block_size": block_size}
        return self_attend("splash", q, k, v, 0.3, **how).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, segments)
    return re.sub(r"\\+22", '"', traced.lower(lowering_platforms=("tpu",)).as_text())


@pytest.mark.parametrize(
    ("length", "wish", "dim", "window", "block"),
    [
        *[(100, None, 64, None, 128), (1600, None, 64, None, 640), (1000, 200, 64, None, 256)],
        *[(4096, None, 128, None, 1024), (4096, None, 136, None, 512), (256, None, 20, 100, 256)],
    ],
)
def test_a_tpu_gets_three_kernels_with_blocks_of_multiples_of_128(monkeypatch, length, wish, dim, window, block):
    """Blocks of wide heads are smaller; heads have any width."""
    monkeypatch.setattr(splash, "platform", lambda: "tpu")
    text = lowered(length, wish, dim, window)
    kernels = re.findall(r'kernel_name = "splash_mha_(\w+?)_segmented', text)
    assert sorted(kernels) == ["dkv", "dq", "fwd"]
    assert set(re.findall(r'"block_q": (\d+)', text)) == {str(block)}
