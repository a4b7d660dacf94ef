"""MLPs of transformer blocks, and their activation functions by the names that configs use."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
from jax.nn.initializers import Initializer

from lmtrain.models.layers.linear import Dims, Linear
from lmtrain.sharding.placement import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # x Phi(x), by erf
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # by tanh
    "relu": jax.nn.relu,
}


class Mlp(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)): [B, S, D] -> [B, S, *outputs].

    `width` is the number of hidden units; by default the outputs are those of the residual stream.
    """

    embed: int
    width: int
    activation: str
    up_init: Initializer
    down_init: Initializer
    use_bias: bool
    is_gated: bool = False
    outputs: Dims | None = None

    def setup(self) -> None:
        embed, hidden = (("embed", self.embed),), (("mlp", self.width),)
        if self.is_gated:
            self.gate = Linear(embed, hidden, self.up_init, self.use_bias)
        self.up = Linear(embed, hidden, self.up_init, self.use_bias)
        self.down = Linear(hidden, self.outputs or embed, self.down_init, self.use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        if self.is_gated:
            return self.down(constrain(activation(self.gate(x)) * self.up(x), "act_batch", "act_seq", "act_mlp"))
        return self.down(activation(constrain(self.up(x), "act_batch", "act_seq", "act_mlp")))
