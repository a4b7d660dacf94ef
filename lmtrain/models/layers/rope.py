"""Rotary position embeddings (RoPE, Su et al. 2021): queries and keys are rotated by angles proportional to position.

Dimension t of the first half of a head and dimension t of the second form a plane, rotated by position * frequency[t]:

    frequency[t] = theta ** (-2 t / C)

With `partial_rotary_factor`, these are the first C dimensions of a head (Black et al. 2022, GPT-NeoX); the others are
not rotated.

To extend the context beyond the trained length, frequencies are scaled (RopeConfig.type):

    linear    all frequencies divided by factor (Chen et al. 2023)
    dynamic   theta grows with the length S beyond the original L: theta * (factor S / L - factor + 1) ** (C / (C - 2))
    llama3    long wavelengths divided by factor, short ones kept, interpolated in between (Llama 3.1)
    yarn      the same with a linear ramp over dimensions, and larger scores (Peng et al. 2023)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.base_config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int, seq_len: int) -> np.ndarray:
    """Radians per position of each plane, float32 [C / 2]; `seq_len` is the maximum context."""
    head_dim = round(head_dim * config.partial_rotary_factor)
    base = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    theta = config.theta
    original = config.original_seq_len or seq_len
    if config.type == "dynamic" and seq_len > original:
        stretched = config.factor * seq_len / original - config.factor + 1
        theta = theta * stretched ** (head_dim / (head_dim - 2))
    plain = theta**-base
    if config.type == "linear":
        plain = plain / config.factor
    elif config.type == "llama3":
        waves = 2 * math.pi / plain
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = np.clip((original / waves - low) / (high - low), 0, 1)
        plain = (1 - kept) * plain / config.factor + kept * plain
    elif config.type == "yarn":
        ramp = _yarn_ramp(config, head_dim, original)
        plain = plain / config.factor * ramp + plain * (1 - ramp)
    return plain.astype(np.float32)


def _yarn_ramp(config: RopeConfig, head_dim: int, original: int) -> np.ndarray:
    """Fraction of scaling per frequency: 0 for those with many turns within the original length, 1 for slow ones."""

    def plane_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = plane_of(config.beta_fast), plane_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, head_dim - 1)
    width = high - low if high > low else 0.001
    return np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)


def rotate(x_BSHC: jax.Array, positions_BS: jax.Array, frequency: np.ndarray, scale: float) -> jax.Array:
    """`x` rotated by the angles of its positions, in float32, and multiplied by `scale`.

    Positions that are the same for all sequences are [1, S]. Dimensions after those of `frequency` are not rotated.
    """
    rotated = 2 * len(frequency)
    if rotated < x_BSHC.shape[-1]:
        first = rotate(x_BSHC[..., :rotated], positions_BS, frequency, scale)
        rest = x_BSHC[..., rotated:]
        return jnp.concatenate([first, rest if scale == 1 else (rest * scale).astype(rest.dtype)], axis=-1)
    angles = positions_BS[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    return _turn(x_BSHC, jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x * cos + (the other half of x) * sin, in float32; [..., C].

    Halves are swapped before the conversion to float32, in the gradient too, which JAX's own derivative does not do:
    a TPU then writes and reads them in 16 bits.
    """
    first, second = jnp.split(x, 2, axis=-1)
    swapped = jnp.concatenate([second, first], axis=-1)
    return (x.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(x.dtype)


_turn = jax.custom_vjp(_turned)


def _turn_forward(x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _turned(x, cos, sin), (cos, sin)


def _turn_backward(angles: tuple[jax.Array, jax.Array], d_turned: jax.Array) -> tuple[jax.Array, None, None]:
    """The opposite rotation."""
    cos, sin = angles
    return _turned(d_turned, cos, -sin), None, None


_turn.defvjp(_turn_forward, _turn_backward)
