"""Modules that predict further tokens in training (MTP; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2).

    module k:  h'_i = norm(block(W [norm(e(t_(i + k))); norm(h_i)])),  with h those of the module before, or the model's

It predicts token i + 1 + k by the model's head. Positions of another document than i's have no loss, and attention is
that of the segments of h: the last position of a document reads a token of the next one, and no position with a loss
attends to it.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.cache import StackCache
from lmtrain.models.interface import Documents
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import RmsNorm
from lmtrain.models.layers.remat import remat
from lmtrain.models.layers.stack import SOWN
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.sharding.placement import constrain


class Prediction(nn.Module):
    """A module: hidden states [B, S, D] and the embeddings of later tokens -> hidden states, twice. `config` is that of
    its block, of the class `block`."""

    config: LlamaConfig
    backend: str
    block_class: type[nn.Module]

    def setup(self) -> None:
        c, dims = self.config, (("embed", self.config.hidden_dim),)
        how = (dims, c.layer_norm_epsilon, c.norm_offset)
        self.norm_token, self.norm_hidden, self.norm_out = (RmsNorm(*how) for _ in range(3))
        self.project = Linear((("joined", 2 * c.hidden_dim),), dims, normal(c.initializer_range), False)
        self.block = self.block_class(c, self.backend)

    def __call__(
        self, h: jax.Array, later: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, jax.Array]:
        x = constrain(self._joined(h, later), "act_batch", "act_stream", "act_embed")
        x, _ = self.block(x, layer, deterministic, documents)
        h = self.norm_out(x)
        return h, h

    def extend(
        self, h: jax.Array, later: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """Hidden states of new positions `start, start + 1, ...`, and the cache with the first `count` of them."""
        (x, cache), _ = self.block.extend((self._joined(h, later), cache), jnp.int32(0), start, count)
        return self.norm_out(x), cache

    def _joined(self, h: jax.Array, later: jax.Array) -> jax.Array:
        both = jnp.concatenate([self.norm_token(later), self.norm_hidden(h)], axis=-1)
        joined: jax.Array = self.project(both)
        return joined


def prediction(config: LlamaConfig, backend: str, block: type[nn.Module]) -> Prediction:
    """A module whose block is like the last of the model."""
    return Prediction(config.of_kind(config.kinds[-1]), backend, block, parent=None)


def predictions(config: LlamaConfig, backend: str, block: type[nn.Module], number: int) -> Any:
    """`number` modules, one after another, with stacked parameters, whose blocks are like the last of the model:
    (h, later [number, ...], numbers of layers, deterministic, documents) -> (h, [number, ...])."""
    scanned = nn.scan(
        remat(Prediction, config.gradient_checkpointing, scan=False, static_argnums=(4,)),
        variable_axes={"params": 0, **dict.fromkeys(SOWN, 0)},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, 0, nn.broadcast, nn.broadcast),
        length=number,
        unroll=number,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(config.of_kind(config.kinds[-1]), backend, block)
