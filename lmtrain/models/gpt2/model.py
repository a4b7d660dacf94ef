"""GPT-2: a stack of pre-norm blocks, each adding attention and then a GELU MLP to the residual stream.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Positions are learned; every linear layer
has a bias, unless use_bias is false; the head is tied to the embedding table, unless tie_word_embeddings is false.

    B batch  S query position  T key position  D embed  H heads  C head dim  F mlp  V vocab  N layers

Initial values (r = initializer_range, 0.02):

    embeddings, qkv, up       normal(0, r)
    out, down                 normal(0, r / sqrt(2 N)), since 2 N of them are summed in the residual stream
    biases                    0
    norms                     scale 1, bias 0
"""

from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import normal

from lmtrain.models.decoder import Decoder
from lmtrain.models.layers.block import Attention, Block, Projected, split_qkv
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import LayerNorm, Mlp


class Gpt2Attention(Attention):
    """Attention from one product for queries, keys and values."""

    def setup(self) -> None:
        c = self.config
        embed, heads, head_dim = ("embed", c.hidden_dim), ("heads", c.num_heads), ("head_dim", c.head_width)
        init, residual = (normal(c.initial_range(c.hidden_dim, adds)) for adds in (False, True))
        self.qkv = Linear((embed,), (("qkv", 3), heads, head_dim), init, c.use_bias)
        self.out = Linear((heads, head_dim), (embed,), residual, c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)

    def project(self, x: jax.Array, positions_BS: jax.Array | None) -> Projected:
        return split_qkv(self.qkv(x))

    def scores(self, layer: jax.Array) -> dict[str, Any]:
        scale = self.config.score_scale
        scaled = scale / (layer + 1) if self.config.scale_attn_by_inverse_layer_idx else scale
        return {"scale": scaled, "upcast": self.config.upcast_attn}


class Gpt2Block(Block):
    """Pre-norm: x += attn(norm_attn(x)); x += mlp(norm_mlp(x))."""

    attention = Gpt2Attention

    def setup(self) -> None:
        c = self.config
        init, residual = normal(c.initial_range(c.hidden_dim)), normal(c.initial_range(c.mlp_dim, adds=True))
        self.norm_attn = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.attn = self.attention(c, self.backend)
        self.norm_mlp = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.mlp = Mlp(c.hidden_dim, c.mlp_dim, c.activation_function, init, residual, c.use_bias)
        self.drop = nn.Dropout(c.resid_pdrop)


class Gpt2LM(Decoder):
    """GPT-2."""

    block = Gpt2Block
    has_learned_positions = True

    def build_norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_dim, self.config.layer_norm_epsilon, self.config.use_bias)

    @property
    def embedding_dropout(self) -> float:
        return self.config.embed_pdrop
