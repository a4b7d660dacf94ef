"""Shuffle without memory: a keyed permutation of 0 .. n-1, computed for each index separately.

A Feistel network (Luby and Rackoff 1988) permutes the smallest domain of an even number of bits that holds n; results
outside 0 .. n-1 are sent through it again until they are inside, which keeps it a permutation ("cycle walking", Black
and Rogaway 2002).
"""

import numpy as np

_ROUNDS = 6


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Permute `index` (int64, each in 0 .. n-1) in the order of (seed, epoch); the order differs in every epoch."""
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    key = mix(mix(np.uint64(seed) + np.zeros(index.shape, np.uint64)) ^ epoch.astype(np.uint64))
    result = index.astype(np.uint64)
    outside = np.ones(index.shape, bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, key[outside])
        outside = result >= np.uint64(n)
    return result.astype(np.int64)


def _feistel(value: np.ndarray, half: int, key: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(mix(key + np.uint64(number)) ^ right) & mask)
    return (left << shift) | right


def mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every input bit changes every output bit."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
