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

import jax

from lmtrain.models.attention.attend import alibi_slopes
from lmtrain.models.gpt2.model import Gpt2Attention, Gpt2Block, Gpt2LM
from lmtrain.models.layers.block import Projected, split_qkv


class MptAttention(Gpt2Attention):
    """Attention with a bias that grows with the distance (ALiBi)."""

    def setup(self) -> None:
        super().setup()
        self.slopes = alibi_slopes(self.config.num_heads, self.config.alibi_bias_max)

    def project(self, x: jax.Array, positions_BS: jax.Array | None) -> Projected:
        return split_qkv(self.qkv(x), self.config.clip_qkv)

    def scores(self, layer: jax.Array) -> dict[str, Any]:
        return {"scale": self.config.score_scale, "slopes": self.slopes}


class MptBlock(Gpt2Block):
    """A block of GPT-2 with this attention."""

    attention = MptAttention


class MptLM(Gpt2LM):
    """MPT."""

    block = MptBlock
    has_learned_positions = False
