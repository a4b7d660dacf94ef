"""A mixture of experts in place of an MLP.

Shazeer et al. 2017, "Outrageously Large Neural Networks". For each token, the outputs of its experts are added with the
router's weights; no token is dropped, whatever the load. With shared experts, the output of one more MLP, of their
total width, is added for all tokens (Dai et al. 2024, "DeepSeekMoE").

Initial values: router and experts as other matrices; biases 0.
"""

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer

from lmtrain.models.layers.mlp import Mlp
from lmtrain.models.moe.config import MoeConfig
from lmtrain.models.moe.experts import Experts
from lmtrain.models.moe.router import Router


class Moe(nn.Module):
    """[B, S, D] -> [B, S, D]. `width` is the number of hidden units of an expert."""

    config: MoeConfig
    embed: int
    width: int
    activation: str
    kernel_init: Initializer

    def setup(self) -> None:
        c = self.config
        init = self.kernel_init
        self.router = Router(c, self.embed, init)
        self.experts = Experts(c.num_experts, self.embed, self.width, self.activation, init)
        if c.shared_experts:
            width = c.shared_experts * self.width
            self.shared = Mlp(self.embed, width, self.activation, init, init, False, is_gated=True)
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, x: jax.Array, used: jax.Array | None, deterministic: bool) -> jax.Array:
        """`used` [B, S]: see `Documents`."""
        y = self.experts(x, *self.router(x, used))
        if self.config.shared_experts:
            y = y + self.shared(x)
        return self.drop(y, deterministic=deterministic)
