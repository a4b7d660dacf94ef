"""Shared parts of the kernels: block sizes, numbering of heads, scores and masks, and loops over blocks."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.attention.kernel import is_hopper_or_later

# Finite, so that the difference of two is not NaN.
MASKED = -1e30
LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """Block sizes in positions: of queries and keys forward, of keys and queries for d_k and d_v, and for d_q."""

    queries: int
    keys: int
    dkv_keys: int
    dkv_queries: int
    dq_queries: int
    dq_keys: int
    warps: int
    stages: int

    @property
    def largest(self) -> int:
        """The largest size; all sizes divide it."""
        return max(self[:6])


# By head width, rounded up to a power of two: the largest blocks that fit into the shared memory of all GPUs from
# compute capability 8.0 on, and into registers without spilling. Server GPUs from 9.0 on have more of both.
SMALL = {
    64: Blocks(128, 64, 128, 64, 128, 64, 8, 3),
    128: Blocks(128, 64, 64, 64, 64, 64, 8, 2),
    256: Blocks(64, 32, 32, 32, 32, 32, 8, 2),
}
LARGE = SMALL | {128: Blocks(128, 64, 128, 64, 128, 64, 8, 3), 256: Blocks(128, 64, 32, 64, 64, 32, 8, 2)}

# Columns of values that a kernel mixes at once, if not all fit.
_PART = 128


def blocks_for(width: int, columns: int, device_kind: str) -> Blocks:
    """Block sizes for heads of this width, with this number of value columns, on this kind of device."""
    table = LARGE if is_hopper_or_later(device_kind) else SMALL
    part = pl.next_power_of_2(columns) if columns <= 2 * _PART else _PART
    return table[max(pl.next_power_of_2(width), part, 64)]


class Static(NamedTuple):
    """Static arguments: block sizes, whether scores have ALiBi and sinks, their cap, and whether the kernels are
    interpreted."""

    blocks: Blocks
    alibi: bool
    has_sinks: bool
    cap: float | None
    interpret: bool

    def call(self, kernel: Any, name: str, **more: Any) -> Any:
        """`pallas_call` of a kernel."""
        options = plgpu.CompilerParams(num_warps=self.blocks.warps, num_stages=self.blocks.stages)
        return pl.pallas_call(kernel, name=name, compiler_params=options, interpret=self.interpret, **more)


class Inputs(NamedTuple):
    """Arrays, their gradients, the specifications of their blocks, or references to blocks inside a kernel.

    `scale` has one number, `slopes` and `sinks` one for each query head. `first` is the first key that each query sees,
    and `last` the last query that sees each key, [B, S]. None where a kernel does not need it. `begin` has the position
    of the first query, if queries are only a part of the sequence; None if they are all of it.
    """

    q: Any
    k: Any
    v: Any
    scale: Any
    slopes: Any
    sinks: Any
    first: Any
    last: Any
    begin: Any

    @property
    def first_query(self) -> Any:
        """The position of the first query, inside a kernel."""
        return 0 if self.begin is None else self.begin[0]


class Sizes(NamedTuple):
    """Static arguments: widths, and the numbering of heads and parts of values: `h` counts parts of query heads.

    Blocks are powers of two, as the hardware's tiles: columns beyond `width` and `value_width` are masked.
    """

    width: int
    value_width: int
    groups: int
    parts: int

    @classmethod
    def of(cls, inputs: Inputs) -> "Sizes":
        heads, kv_heads, columns = inputs.q.shape[2], inputs.k.shape[2], inputs.v.shape[-1]
        parts = columns // _PART if columns > 2 * _PART else 1
        assert columns % parts == 0, f"values of {columns} columns"
        assert parts == 1 or heads == kv_heads, "wide values with grouped heads"
        return cls(inputs.q.shape[-1], columns // parts, heads // kv_heads, parts)

    @property
    def of_key(self) -> int:
        return self.groups * self.parts

    @property
    def tile(self) -> int:
        return pl.next_power_of_2(self.width)

    @property
    def part(self) -> int:
        return pl.next_power_of_2(self.value_width)

    def value_block(self, b: Any, h: Any, i: Any) -> tuple[Any, ...]:
        return b, i, h // self.of_key, h % self.parts

    def mixed_block(self, b: Any, h: Any, i: Any) -> tuple[Any, ...]:
        return b, i, h // self.parts, h % self.parts

    def scalars(self, heads: int = 1) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
        """Block specs of the scale, and of the slopes and sinks of this number of query heads."""
        by_head = pl.BlockSpec((heads,), lambda i, h, b: (h // self.parts,))
        return pl.BlockSpec((1,), lambda i, h, b: (0,)), by_head, by_head

    def by_query(self, inputs: Inputs, rows: int, turn: Any) -> Inputs:
        """Blocks of a kernel whose grid is (queries, parts of query heads, batch): queries by block, all keys."""
        length = inputs.k.shape[1]
        return Inputs(
            pl.BlockSpec((None, rows, None, self.tile), lambda i, h, b: (b, turn(i), h // self.parts, 0)),
            pl.BlockSpec((None, length, None, self.tile), lambda i, h, b: (b, 0, h // self.of_key, 0)),
            pl.BlockSpec((None, length, None, self.part), lambda i, h, b: self.value_block(b, h, 0)),
            *self.scalars(),
            pl.BlockSpec((None, rows), lambda i, h, b: (b, turn(i))),
            None,
            self.begin(inputs),
        )

    def begin(self, inputs: Inputs) -> pl.BlockSpec | None:
        """The block spec of the position of the first query."""
        return None if inputs.begin is None else pl.BlockSpec((1,), lambda i, h, b: (0,))

    def load(self, ref: Any) -> jax.Array:
        """Load a block of queries or keys."""
        return _load(ref, self.here)

    def load_values(self, ref: Any) -> jax.Array:
        """Load a block of values or of mixed values."""
        return _load(ref, self.here_values)

    @property
    def here(self) -> jax.Array | None:
        return _columns(self.tile, self.width)

    @property
    def here_values(self) -> jax.Array | None:
        return _columns(self.part, self.value_width)


class Scores:
    """Base 2 scores, for the hardware's exponential, from products of queries and keys."""

    def __init__(self, static: Static, inputs: Inputs, head: Any = 0):
        self._scale = inputs.scale[0] * LOG2_E
        self._slope = inputs.slopes[head] * LOG2_E if static.alibi else None
        self._cap = None if static.cap is None else static.cap * LOG2_E

    def __call__(self, products: jax.Array, query: Any, key: Any, first: jax.Array, masked: bool) -> jax.Array:
        """Scores [queries, keys], starting at the positions `query` and `key`."""
        rows, columns = products.shape
        query_at = query + jnp.arange(rows)[:, None]
        return self._of(products, query_at, key + jnp.arange(columns)[None, :], first[:, None], masked)

    def before_cap(self, d_scores: jax.Array, scores: jax.Array) -> jax.Array:
        """Gradients with respect to the scores before the cap; those of masked scores are 0."""
        if self._cap is None:
            return d_scores
        return d_scores * (1 - jnp.square(jnp.maximum(scores / self._cap, -1)))

    def transposed(self, products: jax.Array, query: Any, key: Any, first: jax.Array, masked: bool) -> jax.Array:
        """[keys, queries]."""
        rows, columns = products.shape
        query_at = query + jnp.arange(columns)[None, :]
        return self._of(products, query_at, key + jnp.arange(rows)[:, None], first[None, :], masked)

    def _of(self, products: jax.Array, query_at: Any, key_at: Any, first: jax.Array, masked: bool) -> jax.Array:
        scores = products * self._scale
        if self._cap is not None:
            scores = self._cap * jnp.tanh(scores / self._cap)
        if self._slope is not None:
            scores += self._slope * (key_at - query_at).astype(jnp.float32)
        return jnp.where((key_at >= first) & (key_at <= query_at), scores, MASKED) if masked else scores


def over_keys(add: Any, query: Any, first: jax.Array, rows: int, columns: int, blocks: int, begin: Any) -> Any:
    """Call `add(j, sums, masked)` for all of the `blocks` of keys that `rows` queries from position `query` on see."""
    lowest = jnp.min(first) // columns
    end = jnp.minimum(pl.cdiv(query + rows, columns), blocks)
    partly = jnp.clip(query // columns, lowest, end)
    whole = jnp.minimum(pl.cdiv(jnp.max(first), columns), partly)
    return in_three(add, lowest, whole, partly, end, begin)


def in_three(add: Any, begin: Any, whole: Any, partly: Any, end: Any, sums: Any) -> Any:
    """Loop over blocks from `begin` to `end`; those from `whole` up to `partly` need no mask, all others are masked."""
    sums = jax.lax.fori_loop(begin, whole, functools.partial(add, masked=True), sums)
    sums = jax.lax.fori_loop(whole, partly, functools.partial(add, masked=False), sums)
    return jax.lax.fori_loop(partly, end, functools.partial(add, masked=True), sums)


def _columns(tile: int, width: int) -> jax.Array | None:
    """Mask of the existing columns of a block, [1, tile]; None if all exist."""
    return None if tile == width else (jnp.arange(tile) < width)[None, :]


def _load(ref: Any, here: jax.Array | None) -> jax.Array:
    loaded: jax.Array = plgpu.load(ref, mask=here, other=None if here is None else 0.0)
    return loaded
