"""MLPs of transformer blocks, and their activation functions by the names that configs use."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from lmtrain.models.layers.linear import Dims, Linear, sizes
from lmtrain.models.layers.unfused import unfused, unfused_gradient
from lmtrain.sharding.local import split_over
from lmtrain.sharding.placement import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # x Phi(x), by erf
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # by tanh
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
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
        x = unfused(x)
        leading = x.shape[:-1]
        axes: tuple[str, ...] = ("act_batch", "act_seq", "act_mlp")
        if not split_over("act_stream"):  # tokens, as in `Linear`
            x, axes = x.reshape(-1, self.embed), ("act_batch", "act_mlp")
        x = unfused_gradient(x)
        activation = ACTIVATIONS[self.activation]
        hidden = activation(self.gate(x)) * self.up(x) if self.is_gated else activation(self.up(x))
        mixed = self.down(unfused_gradient(constrain(hidden, *axes)))
        return unfused(mixed.reshape(*leading, *sizes(self.down.outputs)))
