"""States of the mixers of a stack, such as keys and values of earlier positions, so that generation reads each token
once.

B batch  H key heads  S new positions  T positions of a cache  C head dim  N layers
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from lmtrain.models.mixer import Mixer


class KvCache(struct.PyTreeNode):
    """Keys and values, each [N, B, H, T, C] for a stack of blocks, or [B, H, T, C]."""

    k: jax.Array
    v: jax.Array

    def write(
        self, k_BHSC: jax.Array, v_BHSC: jax.Array, start: jax.Array, layer: jax.Array | None = None
    ) -> "KvCache":
        """The cache with the new positions `start, start + 1, ...` filled in, of one `layer` of a stack.

        `start` is a scalar, or [B] for sequences of different lengths.
        """
        if jnp.ndim(start):
            return self._write_at(k_BHSC, v_BHSC, start[:, None] + jnp.arange(k_BHSC.shape[2]), layer)
        at: tuple[jax.Array | int, ...] = (0, 0, start, 0)
        if layer is not None:
            at, k_BHSC, v_BHSC = (layer, *at), k_BHSC[None], v_BHSC[None]
        return KvCache(
            jax.lax.dynamic_update_slice(self.k, k_BHSC, at), jax.lax.dynamic_update_slice(self.v, v_BHSC, at)
        )

    def write_last(
        self, k_BHSC: jax.Array, v_BHSC: jax.Array, start: jax.Array, count: Any, layer: jax.Array
    ) -> "KvCache":
        """The cache of the last T positions, position p at index p % T, with the first `count` of the new ones."""
        size, number = self.k.shape[-2], jnp.arange(k_BHSC.shape[2])
        start, count = jnp.reshape(start, (-1, 1)), jnp.reshape(jnp.asarray(count), (-1, 1))
        stays = (number < count) & (number >= count - size)
        place = jnp.where(stays, (start + number) % size, size)  # outside: not written
        return self._write_at(k_BHSC, v_BHSC, jnp.broadcast_to(place, (len(k_BHSC), len(number))), layer)

    def _write_at(
        self, k_BHSC: jax.Array, v_BHSC: jax.Array, place_BS: jax.Array, layer: jax.Array | None
    ) -> "KvCache":
        rows = jnp.arange(len(place_BS))[:, None]
        at = (rows, slice(None), place_BS) if layer is None else (layer, rows, slice(None), place_BS)
        k, v = (new.transpose(0, 2, 1, 3) for new in (k_BHSC, v_BHSC))
        return KvCache(self.k.at[at].set(k, mode="drop"), self.v.at[at].set(v, mode="drop"))

    def extend(
        self,
        k_BHSC: jax.Array,
        v_BHSC: jax.Array,
        layer: jax.Array,
        window: int | None,
        start: jax.Array,
        count: Any = None,
    ) -> tuple["KvCache", "Keys"]:
        """The cache with the first `count` of the new positions `start, start + 1, ...` of a layer of a stack, all by
        default, and what the new queries attend to. `start` and `count` are scalars, or [B]."""
        size = self.k.shape[-2]
        if window != size:
            # positions after the last one are overwritten before any query sees them
            cache = self.write(k_BHSC, v_BHSC, start, layer)
            of_layer = cache.of_layer(layer)
            return cache, Keys(of_layer.k, of_layer.v, None)
        if k_BHSC.shape[2] == 1 and count is None:
            cache = self.write(k_BHSC, v_BHSC, start % size, layer)
            of_layer = cache.of_layer(layer)
            return cache, Keys(of_layer.k, of_layer.v, _positions(start, size))
        before, new = self.of_layer(layer), jnp.reshape(start, (-1, 1)) + jnp.arange(k_BHSC.shape[2])
        places = jnp.reshape(_positions(start - 1, size), (-1, size))
        keys = Keys(
            jnp.concatenate([before.k, k_BHSC], axis=2),
            jnp.concatenate([before.v, v_BHSC], axis=2),
            jnp.concatenate([places, new], axis=1),
        )
        return self.write_last(k_BHSC, v_BHSC, start, k_BHSC.shape[2] if count is None else count, layer), keys

    def of_layer(self, layer: jax.Array) -> "KvCache":
        """The cache of one layer of a stack."""
        k, v = (jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (self.k, self.v))
        return KvCache(k, v)


class Keys(NamedTuple):
    """What new queries attend to: keys and values [B, H, T, C], and the positions of the keys as in `attend`."""

    k: jax.Array
    v: jax.Array
    at: jax.Array | None


class StackCache(struct.PyTreeNode):
    """The states of a stack's mixers: one for all layers with equal mixers, each array [layers, batch, ...].

    `mixers` has the mixer of each state, `kinds` the number of each layer's state.
    """

    states: tuple[dict[str, jax.Array], ...]
    mixers: tuple[Mixer, ...] = struct.field(pytree_node=False)
    kinds: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def empty(cls, mixers: Sequence[Mixer], batch: int, length: int, dtype: Any) -> "StackCache":
        """The states of layers with these mixers before the first of `length` positions."""
        different = tuple(dict.fromkeys(mixers))
        kinds = tuple(map(different.index, mixers))
        states = tuple(
            {
                name: jnp.zeros((kinds.count(kind), batch, *array.shape), array.dtype or dtype)
                for name, array in mixer.state(length).items()
            }
            for kind, mixer in enumerate(different)
        )
        return cls(states, different, kinds)

    def find(self, mixer: Mixer, layer: jax.Array) -> tuple[int, jax.Array]:
        """Where the state of a layer with this mixer is: the state's number, and the layer's number in it."""
        kind = self.mixers.index(mixer)
        if len(self.states) == 1:
            return kind, layer
        return kind, jnp.asarray(np.cumsum(np.equal(self.kinds, kind)) - 1)[layer]

    def with_state(self, kind: int, state: dict[str, jax.Array]) -> "StackCache":
        """With another state of this number."""
        return self.replace(states=(*self.states[:kind], state, *self.states[kind + 1 :]))


def _positions(last: jax.Array, size: int) -> jax.Array:
    """The position at each index of a cache of the last `size` positions up to `last`, negative if there is none."""
    last = jnp.expand_dims(last, -1)
    return last - (last - jnp.arange(size)) % size
