"""Attention of arrays that are split over devices: each device runs the kernel on its own sequences and heads.

A sequence that is split over N devices is collected in two steps. Groups of P neighbours exchange heads for positions
(Jacobs et al. 2023, "DeepSpeed Ulysses"): a device has 1 / P of the heads then, and P times its positions. P is the
largest divisor of N that divides the heads; each key head is copied as often as necessary. If P < N, the G = N / P
groups gather keys and values of their heads (Fang and Zhao 2024, "USP", section 3), and a device computes its queries
against all of them. In causal order the last group would compute most; so groups swap halves of their queries, and
group g gets parts g and 2 G - 1 - g of 2 G (Brandon et al. 2023, "Striped Attention", section 3, on the imbalance).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.attention.attend import Options
from lmtrain.models.mixer import exchange_size
from lmtrain.sharding.local import dividing, num_parts, per_device, split_over

# Options with a number for each head.
_BY_HEAD = ("slopes", "sinks")

# (q, keys, options) -> mixed values, of one device's arrays: `keys` are keys and values, or what they are made from
Local = Callable[[jax.Array, tuple[jax.Array, ...], Options], jax.Array]


def positions_over(length: int, heads: int) -> tuple[str, ...]:
    """The mesh axes that split sequences of this length; none if these do not divide, as in generation.

    `heads` are those of a device. Groups that swap halves of queries need an even number of them.
    """
    positions = split_over("act_seq")
    parts = num_parts(positions)
    size = exchange_size(parts, heads)
    divides = length % parts == 0 and (size == parts or length // parts * size % 2 == 0)
    return positions if divides else ()


def on_each_device(local: Local, q_BHSC: jax.Array, keys: tuple[jax.Array, ...], options: Options) -> jax.Array:
    """`local(q, keys, options)` of each device's part, whose options have its own segments, slopes and sinks. `keys`
    are arrays [B, K, S, ...] of any numbers K of heads.

    Where devices split the query heads and the key heads cannot be split in the same way, each query head gets its own
    copy; each device gets a single one. What does not divide over its devices is not split.
    """
    batch, heads, length, _ = q_BHSC.shape
    by_batch, by_heads = dividing("act_batch", batch), dividing("act_heads", heads)
    positions = positions_over(length, heads // num_parts(by_heads))

    def is_split(x: jax.Array) -> bool:
        return x.shape[1] == heads or dividing("act_kv_heads", x.shape[1]) == by_heads

    keys = tuple(x if is_split(x) or x.shape[1] == 1 else jnp.repeat(x, heads // x.shape[1], axis=1) for x in keys)
    segments = jnp.zeros((batch, length), jnp.int32) if options.segments is None else options.segments
    by_head: dict[str, Any] = {name: jnp.asarray(x) for name in _BY_HEAD if (x := getattr(options, name)) is not None}

    def of_device(q: jax.Array, keys: Any, segments: jax.Array, by_head: Any) -> jax.Array:
        own = dataclasses.replace(options, segments=None if options.segments is None else segments, **by_head)
        return _collected(local, q, keys, own, positions) if positions else local(q, keys, own)

    of_heads, of_one = (PartitionSpec(by_batch, names, positions) for names in (by_heads, None))
    of_keys = tuple(of_heads if is_split(x) else of_one for x in keys)
    specs = (of_heads, of_keys, PartitionSpec(by_batch), dict.fromkeys(by_head, PartitionSpec(by_heads)))
    mixed: jax.Array = per_device(of_device, specs, of_heads)(q_BHSC, keys, segments, by_head)
    return mixed


def _collected(
    local: Local, q: jax.Array, keys: tuple[jax.Array, ...], options: Options, names: tuple[str, ...]
) -> jax.Array:
    """Attention of a device's positions, [B, H, S / N, C]; segments are those of the entire sequence."""
    parts, heads = num_parts(names), q.shape[1]
    size = exchange_size(parts, heads)
    groups = parts // size
    # heads of keys that the devices of a group can share
    copies = [math.lcm(x.shape[1], size) // x.shape[1] for x in keys]
    keys = tuple(jnp.repeat(x, n, axis=1) if n > 1 else x for x, n in zip(keys, copies, strict=True))
    neighbours = [[group * size + number for number in range(size)] for group in range(groups)]
    across = [[group * size + number for group in range(groups)] for number in range(size)]
    index = jax.lax.axis_index(names)

    def exchange(x: jax.Array, split: int, concat: int) -> jax.Array:
        if size == 1:
            return x
        return jax.lax.all_to_all(x, names, split, concat, tiled=True, axis_index_groups=neighbours)

    q, keys = exchange(q, 1, 2), tuple(exchange(x, 1, 2) for x in keys)
    for name in _BY_HEAD:
        if (x := getattr(options, name)) is not None:
            own = jax.lax.dynamic_slice_in_dim(x, index % size * q.shape[1], q.shape[1])
            changed: dict[str, Any] = {name: own}
            options = dataclasses.replace(options, **changed)
    if groups == 1:
        return exchange(local(q, keys, options), 2, 1)
    keys = tuple(jax.lax.all_gather(x, names, axis=2, tiled=True, axis_index_groups=across) for x in keys)
    balance = _Balance(names, size, groups)
    mixed = []
    for part, first in zip(balance.swap(*jnp.split(q, 2, axis=2)), balance.numbers, strict=True):
        mixed.append(local(part, keys, dataclasses.replace(options, first_query=first * part.shape[2])))
    return exchange(jnp.concatenate(balance.swap_back(*mixed), axis=2), 2, 1)


class _Balance:
    """The swap of halves of queries between groups. Group g has parts 2 g and 2 g + 1 before, g and 2 G - 1 - g after.

    Even parts stay or move to groups that no other even part moves to, and so do odd parts: each is one permutation.
    """

    def __init__(self, names: tuple[str, ...], size: int, groups: int):
        self._names = names
        group = jax.lax.axis_index(names) // size
        self._is_odd = group % 2 == 1
        # the parts of this group's two halves after the swap
        self.numbers = group, 2 * groups - 1 - group

        def moves(odd: int) -> list[tuple[int, int]]:
            after = [min(part, 2 * groups - 1 - part) for part in range(odd, 2 * groups, 2)]
            return [
                (before * size + number, after[before] * size + number)
                for before in range(groups)
                for number in range(size)
            ]

        self._moves = moves(0), moves(1)

    def swap(self, even: jax.Array, odd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The parts of this device's group, the earlier one first."""
        even, odd = (jax.lax.ppermute(x, self._names, move) for x, move in zip((even, odd), self._moves, strict=True))
        return self._in_order(even, odd)

    def swap_back(self, first: jax.Array, second: jax.Array) -> tuple[jax.Array, ...]:
        """The inverse of `swap`."""
        parts = zip(self._in_order(first, second), self._moves, strict=True)
        return tuple(jax.lax.ppermute(x, self._names, [(b, a) for a, b in move]) for x, move in parts)

    def _in_order(self, first: Any, second: Any) -> tuple[jax.Array, jax.Array]:
        """Group g has the even part g first if g is even, and second otherwise."""
        return jnp.where(self._is_odd, second, first), jnp.where(self._is_odd, first, second)
