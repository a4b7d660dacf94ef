"""Source of each example of a mixture, and a permutation of examples: pure functions of the example index.

Examples are taken in blocks of 2048. Each block has a number of examples of every source, its share rounded by largest
remainder, in an order that a keyed permutation of the block gives. If rounding would change a share by more than 1 % (a
source with few examples), shares are rounded over several blocks, and the remaining examples are spread over them. Each
is the next example of its source, so an example index always gives the same example, also after a restart. A new
sequence of blocks starts where the weights change.
"""

import functools
from collections.abc import Sequence

import numpy as np

from lmtrain.runtime.errors import UserError

# Shuffle without memory: a keyed permutation of 0 .. n-1, computed for each index separately.
#
# A Feistel network (Luby and Rackoff 1988) permutes the smallest domain of an even number of bits that holds n; results
# outside 0 .. n-1 are sent through it again until they are inside, which keeps it a permutation ("cycle walking", Black
# and Rogaway 2002).

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


BLOCK = 2048

# Maximum number of blocks to round shares over; fewer are used if no share changes by more than the tolerance.
_MAX_BLOCKS = 4096
_TOLERANCE = 0.01


# First example, and the weights of the sources (on any scale) from it on.
Phase = tuple[int, tuple[float, ...]]


class Mixture:
    """Mixture of sources. `source_of(index)` maps global example numbers to sources and to numbers within them."""

    def __init__(self, phases: Sequence[Phase], seed: int):
        starts, weights = zip(*phases, strict=True)
        assert starts[0] == 0
        self._seed = seed
        self._starts = np.array(starts, np.int64)
        self._counts = [block_counts(own) for own in weights]  # [blocks in a cycle, sources]
        zeros = np.zeros((1, len(weights[0])), np.int64)
        self._until = [np.concatenate([zeros, np.cumsum(counts, axis=0)]) for counts in self._counts]
        self._before = [zeros[0]]
        for number in range(len(phases) - 1):
            self._before.append(self._before[number] + self._taken(number, int(np.diff(self._starts)[number])))
        self._block = functools.lru_cache(64)(self._make_block)

    def source_of(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map `index` int64 [rows] to sources int64 [rows] and numbers int64 [rows], counted from 0 in each source."""
        phases = np.searchsorted(self._starts, index, side="right") - 1
        sources, numbers = np.empty_like(index), np.empty_like(index)
        for row, (at, phase) in enumerate(zip(index.tolist(), phases.tolist(), strict=True)):
            block, index_in_block = divmod(at - int(self._starts[phase]), BLOCK)
            source, rank = (int(part[index_in_block]) for part in self._block(phase, block))
            sources[row] = source
            numbers[row] = self._before[phase][source] + self._complete_blocks(phase, block)[source] + rank
        return sources, numbers

    def examples_within(self, limits: Sequence[int], most: int) -> int:
        """Number of examples, at most `most`, before any source exceeds its limit."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            phase = int(np.searchsorted(self._starts, middle - 1, side="right")) - 1
            given = self._before[phase] + self._taken(phase, middle - int(self._starts[phase]))
            low, high = (middle, high) if (given <= np.array(limits)).all() else (low, middle - 1)
        return low

    def _taken(self, phase: int, examples: int) -> np.ndarray:
        """Number of examples of each source among the first `examples` of a phase."""
        complete, rest = divmod(examples, BLOCK)
        sources, _ = self._make_block(phase, complete)
        taken: np.ndarray = self._complete_blocks(phase, complete)
        return taken + np.bincount(sources[:rest], minlength=len(taken))

    def _complete_blocks(self, phase: int, blocks: int) -> np.ndarray:
        """Number of examples of each source in the first `blocks` blocks of a phase."""
        turns, rest = divmod(blocks, len(self._counts[phase]))
        until = self._until[phase]
        return np.asarray(turns * until[-1] + until[rest])

    def _make_block(self, phase: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each example of a block, and the number of earlier examples in the block with the same source."""
        counts = self._counts[phase][block % len(self._counts[phase])]
        key = np.full(BLOCK, phase * 2**40 + block, np.int64)
        order = permute(np.arange(BLOCK), BLOCK, self._seed, key)
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        ranks = np.empty(BLOCK, np.int64)
        for source in range(len(counts)):
            chosen = sources == source
            ranks[chosen] = np.arange(int(chosen.sum()))
        return sources, ranks


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Examples of each source in a block, int64 [blocks in a cycle, sources]; each row sums to 2048.

    Raises `UserError` for a share so small that no block has an example of it.
    """
    shares = np.array(weights, np.float64) / np.sum(weights)
    blocks = 1
    while True:
        totals = _round(shares * BLOCK * blocks)
        exact = np.abs(totals - shares * BLOCK * blocks) <= _TOLERANCE * shares * BLOCK * blocks
        if exact.all() or blocks == _MAX_BLOCKS:
            break
        blocks *= 2
    if (lost := (totals == 0) & (shares > 0)).any():
        smallest = min(weight for weight, is_lost in zip(weights, lost, strict=True) if is_lost)
        raise UserError(
            f"data.train_weights: {smallest} of {sum(weights):g} is too small: it gives "
            f"0 of {BLOCK * blocks:,} examples; set it to 0 or raise it"
        )
    return _take_turns(totals, blocks)


def _round(shares: np.ndarray) -> np.ndarray:
    """Round to integers with the same sum: down, then up by one for those with the largest remainders."""
    counts = np.floor(shares).astype(np.int64)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: round(shares.sum()) - int(counts.sum())]] += 1
    return counts


def _take_turns(totals: np.ndarray, blocks: int) -> np.ndarray:
    """Spread `totals` evenly over the blocks, whose number is a power of two.

    The remainders of an even division are assigned by systematic sampling (Madow 1949): they are laid end to end on a
    line, and a block takes one of each that its comb, with teeth one apart, hits. The combs start at the points of the
    van der Corput sequence, so that the hits of a source are far apart.
    """
    each, left = np.divmod(totals, blocks)
    ends = np.concatenate([[0], np.cumsum(left)])
    bits = blocks.bit_length() - 1
    begins = np.array([int(f"{block:0{bits}b}"[::-1], 2) if bits else 0 for block in range(blocks)])
    teeth = -((begins[:, None] - ends[None, :]) // blocks)  # number of teeth before each end
    return np.asarray(each + np.diff(teeth, axis=1))
