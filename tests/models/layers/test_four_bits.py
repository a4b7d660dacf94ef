"""Matrices in 4 bits: the numbers are those of bitsandbytes, and of the definition of each format."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.four_bits import LEVELS, block_size, code_book, in_blocks

# Of bitsandbytes 0.50.2 on a CPU: F.quantize_4bit(weights(), blocksize=64, quant_type="nf4", compress_statistics=True).
# `numbers` are the first rows of its dequantize_4bit, `largest` the magnitudes that `scale` stands for.
THEIRS = np.load(Path(__file__).with_name("nf4_of_bitsandbytes.npz"))


def weights():
    """[outputs, inputs]"""
    return (np.random.default_rng(0).standard_normal((96, 320)) * 0.02).astype(np.float32)


def codes_of(blocks):
    """[inputs, outputs]"""
    return np.concatenate([blocks.codes >> 4, blocks.codes & 15], axis=1).reshape(blocks.shape)


def test_the_codes_are_those_of_bitsandbytes_and_its_codes_have_the_same_numbers():
    blocks = in_blocks(jnp.asarray(weights().T), 1, "nf4")
    theirs = np.stack([THEIRS["codes"] >> 4, THEIRS["codes"] & 15], axis=1).reshape(96, 320)
    np.testing.assert_array_equal(codes_of(blocks).T, theirs)
    np.testing.assert_allclose(blocks.nested, THEIRS["nested"], rtol=1e-6)
    np.testing.assert_allclose(blocks.offset, THEIRS["offset"], rtol=1e-6)
    with_theirs = blocks.replace(scale=jnp.asarray(THEIRS["scale"].reshape(96, 5).T))
    found = np.asarray(with_theirs.numbers(jnp.float32)).T
    assert np.abs(found[:8] - THEIRS["numbers"]).max() < 1e-7
    # its code for CPUs takes a neighbour of the nearest scale now and then; ours never is farther away
    own = np.asarray(blocks.scale).T.ravel()
    assert (own == THEIRS["scale"]).mean() > 0.99
    largest, nested = THEIRS["largest"], np.repeat(THEIRS["nested"], 256)[: len(own)]
    errors = [np.abs(code_book()[codes] * nested + THEIRS["offset"] - largest) for codes in (own, THEIRS["scale"])]
    assert (errors[0] <= errors[1] + 1e-9).all()


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("shape", [(128, 6), (2, 32, 5), (96, 3, 4), (44, 7), (192, 2)])
def test_numbers_are_the_nearest_levels_times_the_magnitude_of_their_block(kind, shape):
    """By plain numpy, with the magnitudes that the stored ones stand for."""
    outputs = 2 if shape == (96, 3, 4) else 1
    matrix = (np.random.default_rng(1).standard_normal(shape) * 0.1).astype(np.float32)
    blocks = in_blocks(jnp.asarray(matrix), outputs, kind)
    inputs = int(np.prod(shape[: len(shape) - outputs]))
    flat, size = matrix.reshape(inputs, -1), block_size(inputs)
    assert size == {128: 64, 64: 64, 96: 48, 44: 44, 192: 64}[inputs]
    found = np.asarray(blocks.numbers(jnp.float32)).reshape(inputs, -1)
    levels = np.array(LEVELS[kind][kind == "int4" :], np.float32)
    for column in range(flat.shape[1]):
        for begin in range(0, inputs, size):
            part = flat[begin : begin + size, column]
            largest = np.abs(part).max()
            nearest = levels[np.abs(part[:, None] / largest - levels).argmin(1)]
            factor = found[begin : begin + size, column] @ nearest / (nearest @ nearest)
            np.testing.assert_allclose(found[begin : begin + size, column], factor * nearest, atol=1e-7)
            assert factor == pytest.approx(largest, rel=0.04)


def test_zeros_stay_zeros_and_no_scale_is_infinite():
    assert not np.asarray(in_blocks(jnp.zeros((64, 3)), 1, "nf4").numbers(jnp.float32)).any()
    matrix = jnp.zeros((128, 3)).at[70:, 1].set(0.5)
    found = np.asarray(in_blocks(matrix, 1, "nf4").numbers(jnp.float32))
    np.testing.assert_allclose(found, matrix, atol=1e-6)


def test_the_memory_is_half_a_byte_for_each_number_and_a_little_more():
    blocks = in_blocks(jnp.ones((4096, 1024)), 1, "nf4")
    size = sum(array.size * array.dtype.itemsize for array in (blocks.codes, blocks.scale, blocks.nested))
    assert size / (4096 * 1024) == pytest.approx(0.5159, abs=1e-3)
