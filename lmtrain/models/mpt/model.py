"""MPT: pre-norm blocks without biases, with positions as a bias of attention that grows with the distance.

MosaicML 2023, "Introducing MPT-7B"; the bias is ALiBi (Press et al. 2022), which needs no position embeddings and so
does not limit the length.

    x += out(attn(norm_attn(x)));  x += down(gelu(up(norm_mlp(x))))
    scores = q k^T / sqrt(C) + slope_h (key position - query position)

    B batch  S query position  T key position  D embed  H heads  C head dim  F mlp  V vocab  N layers

Initial values (init_scheme kaiming; He et al. 2015 for each matrix by its inputs):

    embedding, qkv, up        normal(0, sqrt(2 / inputs)); the embedding counts D inputs
    out, down                 the same / sqrt(2 N), since 2 N of them are summed in the residual stream
    biases, if any            0
    norms                     scale 1, bias 0

With init_scheme normal, initializer_range replaces sqrt(2 / inputs).
"""

from typing import Any

import flax.linen as nn
import jax
from jax.nn.initializers import normal

from lmtrain.models.attention.attend import alibi_slopes
from lmtrain.models.decoder import Decoder
from lmtrain.models.layers.block import Attention, Block, split_qkv
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import LayerNorm, Mlp
from lmtrain.models.mpt.config import MptConfig


class MptAttention(Attention):
    """Attention with a bias that grows with the distance (ALiBi)."""

    config: MptConfig

    def setup(self) -> None:
        c = self.config
        embed, heads, head_dim = ("embed", c.hidden_dim), ("heads", c.num_heads), ("head_dim", c.head_width)
        init, residual = (normal(c.initial_range(c.hidden_dim, adds)) for adds in (False, True))
        self.qkv = Linear((embed,), (("qkv", 3), heads, head_dim), init, c.use_bias)
        self.out = Linear((heads, head_dim), (embed,), residual, c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)
        self.slopes = alibi_slopes(c.num_heads, c.alibi_bias_max)

    def project(self, x: jax.Array, positions_BS: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        return split_qkv(self.qkv(x), self.config.clip_qkv)

    def scores(self, layer: jax.Array) -> dict[str, Any]:
        return {"scale": self.config.score_scale, "slopes": self.slopes}


class MptBlock(Block):
    """Pre-norm: x += attn(norm_attn(x)); x += mlp(norm_mlp(x))."""

    config: MptConfig

    def setup(self) -> None:
        c = self.config
        init, residual = normal(c.initial_range(c.hidden_dim)), normal(c.initial_range(c.mlp_dim, adds=True))
        self.norm_attn = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.attn = MptAttention(c, self.backend)
        self.norm_mlp = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.mlp = Mlp(c.hidden_dim, c.mlp_dim, "gelu", init, residual, c.use_bias)
        self.drop = nn.Dropout(c.resid_pdrop)


class MptLM(Decoder):
    """MPT."""

    config: MptConfig

    block = MptBlock

    def build_norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_dim, self.config.layer_norm_epsilon, self.config.use_bias)

    @property
    def embedding_dropout(self) -> float:
        return self.config.embed_pdrop
