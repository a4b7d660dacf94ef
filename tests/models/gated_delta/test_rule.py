"""The gated delta rule: the recurrence in float64, transformers, packed documents, and steps of generation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.gated_delta.inverse import unit_inverse
from lmtrain.models.gated_delta.rule import gated_delta_rule, gated_delta_step

B, K, H, C, E = 2, 2, 4, 16, 8
NAMES = ("q", "k", "v", "g", "beta")


def arrays(length: int, seed: int = 0, alike: float = 0.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, length, K, C)) for _ in range(2))
    k = (1 - alike) * k + alike * k[:, :1]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return {
        "q": q * C**-0.5,
        "k": k,
        "v": rng.normal(size=(B, length, H, E)),
        "g": -rng.exponential(0.1, size=(B, length, H)),
        "beta": rng.uniform(size=(B, length, H)),
    }


def starts_of(length: int, at: list[int]) -> np.ndarray:
    starts = np.zeros((B, length), bool)
    starts[:, [position for position in at if position < length]] = True
    return starts


def recurrence(x: dict[str, np.ndarray], starts: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, one token after another."""
    q, k = (np.repeat(x[name], H // K, axis=2) for name in "qk")
    state, out = state.astype(np.float64), []
    for t in range(q.shape[1]):
        state = np.where(starts[:, t, None, None, None], 0, state) * np.exp(x["g"][:, t])[..., None, None]
        change = (x["v"][:, t] - np.einsum("bhc,bhce->bhe", k[:, t], state)) * x["beta"][:, t, :, None]
        state = state + k[:, t, ..., None] * change[..., None, :]
        out.append(np.einsum("bhc,bhce->bhe", q[:, t], state))
    return np.stack(out, 1), state


def float32(x: dict[str, np.ndarray]) -> list[jax.Array]:
    return [jnp.asarray(x[name], jnp.float32) for name in NAMES]


STATE = np.random.default_rng(9).normal(size=(B, H, C, E))
PACKED = [5, 6, 7, 27, 64, 65, 127, 128, 131]


@pytest.mark.parametrize(("length", "chunk"), [(150, 64), (128, 128), (5, 64), (1, 64)])
@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["random keys", "equal keys"])
@pytest.mark.parametrize("at", [[], PACKED], ids=["one document", "packed"])
def test_outputs_and_state_are_those_of_the_recurrence(length, chunk, alike, at):
    x, starts = arrays(length, alike=alike), starts_of(length, at)
    out, state = jax.jit(functools.partial(gated_delta_rule, chunk=chunk))(*float32(x), starts, jnp.float32(STATE))
    expected, last = recurrence(x, starts, STATE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(state, last, rtol=0, atol=2e-6 * max(1, np.abs(last).max()))


def test_gradients_of_packed_documents_are_those_of_each_alone():
    length, bounds = 150, [0, *PACKED, 150]
    x, starts = arrays(length), starts_of(length, PACKED)
    weights = np.random.default_rng(3).normal(size=(B, length, H, E)).astype(np.float32)

    def loss(values, starts, weights):
        return (gated_delta_rule(*values, starts, chunk=64)[0] * weights).sum()

    found = jax.jit(jax.grad(loss))(float32(x), starts, weights)
    alone = []
    for begin, end in itertools.pairwise(bounds):
        part = [value[:, begin:end] for value in float32(x)]
        alone.append(jax.grad(loss)(part, None, weights[:, begin:end]))
    for name, gradient, *parts in zip(NAMES, found, *alone, strict=True):
        expected = np.concatenate(parts, 1)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=name)


def test_gradients_are_those_of_float64():
    """By differences of the recurrence along random directions."""
    length, starts = 70, starts_of(70, [3, 40, 64])
    x = arrays(length)
    rng = np.random.default_rng(4)
    weights, of_state = rng.normal(size=(B, length, H, E)), rng.normal(size=STATE.shape)

    def loss(values, state):
        out, last = gated_delta_rule(*values, starts, state, chunk=32)
        return (out * weights).sum() + (last * of_state).sum()

    def exact(x, state):
        out, last = recurrence(x, starts, state)
        return (out * weights).sum() + (last * of_state).sum()

    gradients, d_state = jax.jit(jax.grad(loss, (0, 1)))(float32(x), jnp.float32(STATE))
    for name, gradient in [*zip(NAMES, gradients, strict=True), ("state", d_state)]:
        value = STATE if name == "state" else x[name]
        direction = rng.normal(size=value.shape)
        ends = []
        for sign in (1, -1):
            moved = value + sign * 1e-5 * direction
            ends.append(exact(x, moved) if name == "state" else exact(x | {name: moved}, STATE))
        expected = (ends[0] - ends[1]) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-4), name


def test_it_is_what_transformers_computes():
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = arrays(150)
    theirs = [torch.tensor(np.repeat(x[n], H // K, axis=2) if n in "qk" else x[n], dtype=torch.float32) for n in NAMES]
    theirs[0] *= C**0.5  # they scale
    out, state = torch_chunk_gated_delta_rule(*theirs[:3], g=theirs[3], beta=theirs[4], output_final_state=True)
    ours, last = gated_delta_rule(*float32(x))
    np.testing.assert_allclose(ours, out, atol=2e-6)
    np.testing.assert_allclose(last, state, atol=2e-6)


def test_steps_after_a_prompt_continue_it_and_padding_leaves_the_state():
    x = arrays(40)
    values = float32(x)
    expected, last = gated_delta_rule(*values, chunk=16)
    padded = [jnp.pad(value[:, :25], ((0, 0), (0, 7), *((0, 0) for _ in value.shape[2:]))) for value in values]
    _, state = gated_delta_rule(*padded, chunk=16)
    for t in range(25, 40):
        out, state = gated_delta_step(*(value[:, t] for value in values), state)
        np.testing.assert_allclose(out, expected[:, t], atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 128])
def test_the_inverse_is_exact_for_repeated_tokens(length):
    """With equal keys, strength 1 and no decay its entries are at most 1, while powers of the matrix reach 1e30."""
    a = np.tril(np.ones((length, length)), -1)
    found = jax.jit(unit_inverse)(a.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(length) + a), atol=1e-6)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_16_bit_inputs_keep_gates_inverse_and_state_in_float32(strength):
    x = arrays(150, alike=0.9)
    x["beta"] *= strength
    values = [v.astype(jnp.bfloat16) if name in "qkv" else v for name, v in zip(NAMES, float32(x), strict=True)]
    rounded = {name: np.asarray(value, np.float64) for name, value in zip(NAMES, values, strict=True)}
    exact, _ = recurrence(rounded, starts_of(150, []), np.zeros_like(STATE))
    out, state = gated_delta_rule(*values, chunk=64)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    error = np.sqrt(np.square(np.asarray(out, np.float32) - exact).mean() / np.square(exact).mean())
    assert error < 8e-3 * strength
