"""What the blocks of all families share: attention with its cache, and a block of attention and MLP."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.attention.attend import HIGHEST, SCORES, attend, highest_scores
from lmtrain.models.attention.kernel import self_attend
from lmtrain.models.cache import KvCache, StackCache
from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.layers.remat import BLOCK_INPUT, unfused
from lmtrain.sharding.placement import constrain


class TokenMixer(Protocol):
    """A module that mixes the positions of a layer; `Mixer` describes it."""

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        """[B, S, D] -> [B, S, D], each document separately. `layer` is the layer's number."""

    def extend(
        self, x: jax.Array, layer: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """The outputs of new positions `start, start + 1, ...`, and the cache with the first `count` of them."""


class Projected(NamedTuple):
    """Queries [B, H, S, C], keys and values [B, K, S, C], and the gate of outputs before its sigmoid, [B, S, H, C]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None = None


class Attention(nn.Module):
    """Causal attention of all heads: [B, S, D] -> [B, S, D].

    The first of `config.mixers` describes it. A family defines in `setup` the layers `out` and `drop_weights` (dropout
    on the attention weights), and the methods `project` and `scores`.
    """

    config: Any
    backend: str

    def project(self, x: jax.Array, positions_BS: jax.Array | None) -> Projected:
        """What attention is computed from. Positions None: 0, 1, ... in every sequence."""
        raise NotImplementedError

    def scores(self, layer: jax.Array) -> dict[str, Any]:
        """Arguments of `attend` that define the scores: `scale`, and others that the family needs."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        q, k, v, gate = self.project(unfused(x), documents.positions)
        scores = self.scores(layer)
        if self.is_mutable_collection(SCORES) and not self.is_initializing():
            self.sow(SCORES, HIGHEST, highest_scores(q, k, scores["scale"], scores.get("window"), documents.segments))
        mixed_BHSC = self_attend(
            self.backend,
            q,
            k,
            v,
            **scores,
            drop=active(self.drop_weights, deterministic),
            segments=documents.segments,
            block_size=self.config.flash_attention_block_size,
        )
        mixed_BSHC = constrain(mixed_BHSC.transpose(0, 2, 1, 3), "act_batch", "act_seq", "act_heads", None)
        return unfused(self.out(_gated(mixed_BSHC, gate)))

    def extend(
        self, x: jax.Array, layer: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """Attention of new positions `start, start + 1, ...` to all earlier ones and themselves."""
        q, k, v, gate = self.project(x, jnp.reshape(start, (-1, 1)) + jnp.arange(x.shape[1]))
        scores = self.scores(layer)
        kind, number = cache.find(self.config.mixers[0], layer)
        state, keys = KvCache(**cache.states[kind]).extend(k, v, number, scores.get("window"), start, count)
        mixed_BHSC = attend(q, keys.k, keys.v, first_query=start, key_at=keys.at, **scores)
        return self.out(_gated(mixed_BHSC.transpose(0, 2, 1, 3), gate)), cache.with_state(
            kind, {"k": state.k, "v": state.v}
        )


def _gated(mixed: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Outputs times the sigmoid of the gate, if there is one (Qiu et al. 2025)."""
    return mixed if gate is None else mixed * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(mixed.dtype)


def split_qkv(qkv_BSXHC: jax.Array, clip: float | None = None) -> Projected:
    """Queries, keys and values [B, H, S, C] from one product [B, S, 3, H, C]; `clip`: to plus or minus this."""
    qkv = constrain(qkv_BSXHC, "act_batch", "act_seq", None, "act_heads", None)
    if clip is not None:
        qkv = jnp.clip(qkv, -clip, clip)
    q, k, v = (
        constrain(qkv[:, :, i].transpose(0, 2, 1, 3), "act_batch", "act_heads", "act_seq", None) for i in range(3)
    )
    return Projected(q, k, v)


def active(dropout: nn.Dropout, deterministic: bool) -> Callable[[jax.Array], jax.Array] | None:
    """The dropout as a function; None if it changes nothing."""
    if deterministic or not dropout.rate:
        return None
    return lambda weights: dropout(weights, deterministic=False)


class Block(nn.Module):
    """A mixer of positions, by default attention, and an MLP, each after a norm and added to the residual stream.

    A family defines in `setup` the layers `norm_attn`, `attn`, `norm_mlp`, `mlp`, and `drop` (dropout on the outputs of
    both), or `mixer` and the methods `attention_input` and `add`.
    """

    config: Any
    backend: str

    @property
    def mixer(self) -> TokenMixer:
        """What mixes positions; attention, unless the family has another one."""
        mixer: TokenMixer = self.attn
        return mixer

    def attention_input(self, x: jax.Array) -> jax.Array:
        """The input of attention."""
        return self.norm_attn(x)

    def add(
        self, x: jax.Array, mixed: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS
    ) -> jax.Array:
        """The residual stream after the block, from that before it and the output of attention."""
        x = x + self.drop(mixed, deterministic=deterministic)
        return x + self.drop(self.mlp(self.norm_mlp(x)), deterministic=deterministic)

    def __call__(
        self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, BLOCK_INPUT)
        mixed = self.mixer(self.attention_input(x), layer, deterministic, documents)
        return constrain(self.add(x, mixed, deterministic, documents), "act_batch", "act_stream", "act_embed"), None

    def extend(
        self, state: tuple[jax.Array, StackCache], layer: jax.Array, start: jax.Array, count: Any = None
    ) -> tuple[tuple[jax.Array, StackCache], None]:
        x, cache = state
        mixed, cache = self.mixer.extend(self.attention_input(x), layer, cache, start, count)
        return (self.add(x, mixed, deterministic=True), cache), None
