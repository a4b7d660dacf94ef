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
# Of latent attention with the sizes of DeepSeek, whose products of 128 and of 64 columns are separate.
_LATENT = Blocks(128, 64, 64, 64, 128, 64, 8, 3)

# Columns of values that a kernel mixes at once, if not all fit.
_PART = 128


def blocks_for(width: int, columns: int, device_kind: str, shared: int = 0) -> Blocks:
    """Block sizes for heads of this width, with this number of value columns, on this kind of device. `shared`: the
    columns of further keys that all heads share."""
    is_large = is_hopper_or_later(device_kind)
    part = pl.next_power_of_2(columns) if columns <= 2 * _PART else _PART
    if is_large and shared and max(width, part) <= 128 and shared <= 64:
        return _LATENT
    return (LARGE if is_large else SMALL)[max(pl.next_power_of_2(width + shared), part, 64)]


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

    Of latent attention, `k` has the keys of each head and then its values, `v` is None, and the last columns of queries
    meet the keys `shared` [B, S, R] of all heads.
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
    shared: Any = None

    @property
    def first_query(self) -> Any:
        """The position of the first query, inside a kernel."""
        return 0 if self.begin is None else self.begin[0]


class Columns(NamedTuple):
    """Columns of a block: `width` from `offset` on. Tiles are powers of two, as those of the hardware: columns beyond
    are masked."""

    width: int
    offset: int = 0

    @property
    def tile(self) -> int:
        return pl.next_power_of_2(self.width)

    @property
    def end(self) -> int:
        return self.offset + self.tile

    def load(self, ref: Any, *index: Any) -> jax.Array:
        """The columns of the rows at `index`."""
        here = self._here
        loaded: jax.Array = plgpu.load(self._of(ref, index), mask=here, other=None if here is None else 0.0)
        return loaded

    def store(self, ref: Any, value: jax.Array) -> None:
        """Write the columns of all rows."""
        plgpu.store(self._of(ref, (slice(None),)), value.astype(ref.dtype), mask=self._here)

    def _of(self, ref: Any, index: Any) -> Any:
        is_all = self.offset == 0 and ref.shape[-1] == self.tile
        return ref.at[(*index, slice(None) if is_all else pl.ds(self.offset, self.tile))]

    @property
    def _here(self) -> jax.Array | None:
        """Mask of the columns that exist, [1, tile]; None if all do."""
        return None if self.tile == self.width else (jnp.arange(self.tile) < self.width)[None, :]


class Sizes(NamedTuple):
    """Static arguments: widths, and the numbering of heads and parts of values: `h` counts parts of query heads.

    `width` is that of the keys of a head, and `shared` that of further keys for all heads, 0 if there are none.
    """

    width: int
    shared: int
    value_width: int
    groups: int
    parts: int

    @classmethod
    def of(cls, inputs: Inputs) -> "Sizes":
        heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
        shared = 0 if inputs.shared is None else inputs.shared.shape[-1]
        width = inputs.q.shape[-1] - shared
        columns = inputs.k.shape[-1] - width if inputs.v is None else inputs.v.shape[-1]
        parts = columns // _PART if columns > 2 * _PART else 1
        assert columns % parts == 0, f"values of {columns} columns"
        assert parts == 1 or (heads == kv_heads and not shared), "wide values with grouped heads, or of latents"
        return cls(width, shared, columns // parts, heads // kv_heads, parts)

    @property
    def queries(self) -> tuple[Columns, ...]:
        """The columns of queries, for products with the keys of the head, and with those of all heads."""
        return (Columns(self.width), *([Columns(self.shared, self.width)] if self.shared else []))

    @property
    def keys(self) -> tuple[Columns, ...]:
        return (Columns(self.width), *([Columns(self.shared)] if self.shared else []))

    @property
    def values(self) -> Columns:
        return Columns(self.value_width, self.width if self.shared else 0)

    @property
    def mixed(self) -> Columns:
        return Columns(self.value_width)

    @property
    def query_block(self) -> int:
        """Columns of a block of queries."""
        return pl.next_power_of_2(self.queries[-1].end)

    @property
    def key_block(self) -> int:
        """Columns of a block of keys, with the values if they are in one array."""
        return pl.next_power_of_2(self.values.end) if self.shared else self.keys[0].tile

    @property
    def of_key(self) -> int:
        return self.groups * self.parts

    @property
    def part(self) -> int:
        return self.mixed.tile

    def load_keys(self, inputs: Inputs, *index: Any) -> tuple[jax.Array, ...]:
        """The keys of the head, and those of all heads, at `index`."""
        refs = (inputs.k, *([] if inputs.shared is None else [inputs.shared]))
        return tuple(columns.load(ref, *index) for columns, ref in zip(self.keys, refs, strict=True))

    def load_queries(self, ref: Any, *index: Any) -> tuple[jax.Array, ...]:
        """The columns of `queries` at `index`."""
        return tuple(columns.load(ref, *index) for columns in self.queries)

    def load_values(self, inputs: Inputs, *index: Any) -> jax.Array:
        return self.values.load(inputs.k if inputs.v is None else inputs.v, *index)

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
            pl.BlockSpec((None, rows, None, self.query_block), lambda i, h, b: (b, turn(i), h // self.parts, 0)),
            pl.BlockSpec((None, length, None, self.key_block), lambda i, h, b: (b, 0, h // self.of_key, 0)),
            None
            if self.shared
            else pl.BlockSpec((None, length, None, self.part), lambda i, h, b: self.value_block(b, h, 0)),
            *self.scalars(),
            pl.BlockSpec((None, rows), lambda i, h, b: (b, turn(i))),
            None,
            self.begin(inputs),
            self.of_all(length, lambda i: 0),
        )

    def of_all(self, rows: int, turn: Any) -> pl.BlockSpec | None:
        """The block spec of the keys of all heads."""
        tile = pl.next_power_of_2(max(self.shared, 1))
        return pl.BlockSpec((None, rows, tile), lambda i, h, b: (b, turn(i), 0)) if self.shared else None

    def begin(self, inputs: Inputs) -> pl.BlockSpec | None:
        """The block spec of the position of the first query."""
        return None if inputs.begin is None else pl.BlockSpec((1,), lambda i, h, b: (0,))


def products(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> jax.Array:
    """The sum of left right^T over their columns."""
    return functools.reduce(jnp.add, (plgpu.dot(a, b.T) for a, b in zip(left, right, strict=True)))


def add_products(sums: tuple[jax.Array, ...], left: jax.Array, right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`sums` plus left right, for each of the columns of `right`."""
    return tuple(s + plgpu.dot(left.astype(b.dtype), b) for s, b in zip(sums, right, strict=True))


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
