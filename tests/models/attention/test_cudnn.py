"""NVIDIA's kernels without a GPU: arguments and documents as JAX's functions take them, and calls in the program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.compiled.executions import RARELY
from lmtrain.models.attention import cudnn_packed
from lmtrain.models.attention.attend import attend
from lmtrain.models.attention.kernel import missing_tokamax, self_attend
from lmtrain.models.layers.remat import checkpoint


@pytest.mark.parametrize(("kv_heads", "window"), [(1, None), (2, 1), (4, 5), (2, 30)])
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


@pytest.mark.skipif(bool(missing_tokamax()), reason="needs JAX 0.11.1, and so Python 3.12: tools/check_matrix.sh")
@pytest.mark.parametrize(("kv_heads", "window", "cap"), [(1, None, None), (2, 1, None), (4, 5, 2.0), (2, None, 0.5)])
def test_the_arguments_for_tokamax_give_plain_attention_and_its_gradients(kv_heads, window, cap):
    """Its arguments have the same meaning for all implementations; without a GPU it has plain operations."""
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.normal(size=(2, heads, 13, 8)).astype(np.float32) for heads in (4, kv_heads, kv_heads, 4))

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend, *arrays):
        mixed, pull = jax.vjp(lambda *a: self_attend(backend, *a, 0.3, window=window, cap=cap), *arrays)
        return mixed, *pull(d)

    for found, expected in zip(run("tokamax", q, k, v), run("xla", q, k, v), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


JAX_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
H100 = "NVIDIA H100 80GB HBM3"


def as_documented(q, k, v, bias, mask, q_lengths, k_lengths, q_starts, k_starts, *, mask_type, sliding_window_length):
    """JAX's function by its documentation: documents by their starts and lengths, positions before heads."""
    assert bias is None
    assert mask is None
    assert mask_type.name == "PADDING_CAUSAL"
    assert k.shape == q.shape
    assert q_lengths.dtype == q_starts.dtype == np.int32
    at = jnp.arange(q.shape[1])
    begin, length = q_starts[:, :-1, None], q_lengths[:, :, None]
    inside = (begin >= 0) & (at >= begin) & (at < begin + length)
    segments = jnp.where(inside.any(1), inside.argmax(1), -1)
    assert k_lengths is q_lengths
    assert k_starts is q_starts
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    mixed = attend(q, k, v, 1.0, segments=(segments, segments), window=sliding_window_length)
    return mixed.transpose(0, 2, 1, 3)


def documents(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


ROWS = {
    "one and three": [documents(100), documents(50, 1, 49)],
    "numbers in any order": [documents(30, 70), np.repeat([1, 0, 2], [20, 60, 20])],
    "the most that fit": [documents(*[1] * 63, 37), documents(100)],
    "one too many": [documents(*[1] * 64, 36), documents(60, 40)],
    "a document each": [np.arange(100), np.arange(100)],
}


@pytest.mark.parametrize(
    ("rows", "window"), [*((rows, None) for rows in ROWS), ("one and three", 7), ("one too many", 7)]
)
def test_documents_give_plain_attention_and_its_gradients(monkeypatch, rows, window):
    monkeypatch.setattr(f"{JAX_MODULE}.dot_product_attention", as_documented)
    rng = np.random.default_rng(0)
    q, k, v, weight = (rng.normal(size=(2, heads, 100, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    segments = np.stack(ROWS[rows]).astype(np.int32)

    def loss(backend):
        return lambda q, k, v: (self_attend(backend, q, k, v, 0.3, segments=segments, window=window) * weight).sum()

    found, expected = (
        jax.jit(jax.value_and_grad(loss(name), argnums=(0, 1, 2)))(q, k, v) for name in ("cudnn_packed", "xla")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.fixture
def for_gpus(monkeypatch):
    """cuDNN is not installed here, and this process has no GPU."""
    monkeypatch.setattr(f"{JAX_MODULE}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{JAX_MODULE}.check_compute_capability", lambda _: True)  # restored after the test
    monkeypatch.setattr(cudnn_packed, "device_kind", lambda: H100)


def lowered(function, *shapes):
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    return text.replace("\\22", '"')


def calls(text):
    return re.findall(r"custom_call @__cudnn\$fmhaSoftmax(\w*)\(", text)


@pytest.mark.parametrize("backend", ["cudnn", "cudnn_packed"])
def test_the_program_for_a_gpu_calls_the_kernel_and_runs_it_once_where_its_results_are_saved(for_gpus, backend):
    q, k = (jax.ShapeDtypeStruct((2, heads, 100, 64), jnp.bfloat16) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, 100), jnp.int32)

    def gradient(policy):
        def loss(q, k, v, segments):
            given = segments if backend == "cudnn_packed" else None
            mix = checkpoint(lambda *x: self_attend(backend, *x, 0.125, segments=given, window=32), policy, True)
            return (mix(q, k, v).astype(jnp.float32) ** 2).sum()

        return lowered(jax.grad(loss, argnums=(0, 1, 2)), q, k, k, segments)

    assert calls(gradient("full")) == calls(gradient("dots_no_kernels")) == ["", "", "Backward"]
    for policy in ("dots", "save_attention", False):
        text = gradient(policy)
        assert calls(text) == ["", "Backward"]
        assert backend == "cudnn_packed" or re.findall(r'"mask_type": "(\w+)"', text) == ["CAUSAL"] * 2
        assert (f"/{RARELY}/" in text) == (backend == "cudnn_packed")
        assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {"32"}
