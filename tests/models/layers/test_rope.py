"""Rotary embeddings: the rotation, and each type of scaling against its published formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.base_config import RopeConfig
from lmtrain.models.layers.rope import frequencies, rotate

RNG = np.random.default_rng(0)
PLAIN = 100.0 ** (-np.arange(0, 8, 2) / 8)


def test_scores_depend_only_on_the_distance():
    frequency = frequencies(RopeConfig(theta=100.0), 8, 64)
    q, k = (jnp.asarray(RNG.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(at, other):
        turned = [rotate(x, jnp.array([[p]]), frequency, 1.0) for x, p in ((q, at), (k, other))]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 1) == pytest.approx(score(45, 43), rel=1e-4)
    assert score(3, 1) != pytest.approx(score(30, 1), rel=0.1)


def test_position_zero_is_not_rotated_and_norms_are_preserved():
    x = jnp.asarray(RNG.normal(size=(2, 5, 3, 8)), jnp.float32)
    turned = rotate(x, jnp.arange(5)[None], frequencies(RopeConfig(), 8, 64), 1.0)
    np.testing.assert_allclose(turned[:, 0], x[:, 0], rtol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_only_a_part_of_a_head_is_rotated():
    config = RopeConfig(theta=100.0, partial_rotary_factor=0.5)
    x = jnp.asarray(RNG.normal(size=(2, 5, 3, 16)), jnp.float32)
    turned = rotate(x, jnp.arange(5)[None], frequencies(config, 16, 64), 1.0)
    first = rotate(x[..., :8], jnp.arange(5)[None], frequencies(RopeConfig(theta=100.0), 8, 64), 1.0)
    np.testing.assert_array_equal(turned, jnp.concatenate([first, x[..., 8:]], axis=-1))


def test_default_and_linear():
    np.testing.assert_allclose(frequencies(RopeConfig(theta=100.0), 8, 64), PLAIN, rtol=1e-6)
    stretched = frequencies(RopeConfig(type="linear", factor=4.0, theta=100.0), 8, 64)
    np.testing.assert_allclose(stretched, PLAIN / 4, rtol=1e-6)


def test_dynamic_scales_only_beyond_the_trained_length():
    config = RopeConfig(type="dynamic", factor=2.0, theta=100.0, original_seq_len=64)
    np.testing.assert_allclose(frequencies(config, 8, 64), PLAIN, rtol=1e-6)
    theta = 100.0 * (2 * 256 / 64 - 1) ** (8 / 6)
    np.testing.assert_allclose(frequencies(config, 8, 256), theta ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_scales_long_ones():
    config = RopeConfig(type="llama3", factor=8.0, original_seq_len=64, theta=100.0)
    found = frequencies(config, 8, 512)
    for plain, stretched in zip(PLAIN, found, strict=True):
        wave = 2 * math.pi / plain
        if wave < 64 / 4:
            expected = plain
        elif wave > 64:
            expected = plain / 8
        else:
            kept = (64 / wave - 1) / 3
            expected = (1 - kept) * plain / 8 + kept * plain
        assert stretched == pytest.approx(expected, rel=1e-6)
    assert found[0] == pytest.approx(PLAIN[0])
    assert found[-1] < PLAIN[-1]


def test_yarn_scales_scores_and_keeps_the_fastest_plane():
    config = RopeConfig(type="yarn", factor=4.0, original_seq_len=64, theta=100.0)
    found = frequencies(config, 8, 256)
    assert config.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert found[0] == pytest.approx(PLAIN[0])
    assert found[-1] == pytest.approx(PLAIN[-1] / 4)
    assert RopeConfig().magnitude == 1.0
