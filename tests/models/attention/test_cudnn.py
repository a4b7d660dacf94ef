"""NVIDIA's kernel, without a GPU: arguments of JAX's function, and kernel calls in the lowered program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.attention.kernel import self_attend


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_the_arguments_for_jax_give_plain_attention(monkeypatch, kv_heads, window):
    """JAX's arguments have the same meaning for all implementations; only the kernel is not available here."""
    asked = []
    attention = jax.nn.dot_product_attention

    def record(*arrays, implementation, **arguments):
        asked.append(implementation)
        return attention(*arrays, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, heads, 13, 8)).astype(np.float32) for heads in (4, kv_heads, kv_heads))
    found, expected = jax.jit(
        lambda q, k, v: [self_attend(backend, q, k, v, 0.3, window=window) for backend in ("cudnn", "xla")]
    )(q, k, v)
    assert asked == ["cudnn"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 32])
def test_the_program_for_a_gpu_calls_the_kernel_forward_and_backward(monkeypatch, window):
    # JAX queries the version of cuDNN before it lowers the call; cuDNN is not installed here
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct((2, heads, 100, 64), jnp.bfloat16) for heads in (4, 2))

    def loss(q, k, v):
        return self_attend("cudnn", q, k, v, 0.125, window=window).astype(jnp.float32).sum()

    for function, calls in ((loss, [""]), (jax.grad(loss, argnums=(0, 1, 2)), ["", "Backward"])):
        text = jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
        assert re.findall(r"custom_call @__cudnn\$fmhaSoftmax(\w*)\(", text) == calls
        assert re.findall(r'"mask_type": "(\w+)"', text) == ["CAUSAL"] * len(calls)
        lengths = {int(length) for length in re.findall(r'"sliding_window_length": (\d+)', text)}
        assert lengths == ({0} if window is None else {window})
