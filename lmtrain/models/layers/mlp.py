"""MLPs and norms of transformer blocks, and activation functions by the names that configs use."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from lmtrain.models.layers.linear import Dims, Linear, declare, sizes
from lmtrain.models.layers.remat import unfused, unfused_gradient
from lmtrain.sharding.local import flat_on_cpu, split_over
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


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + epsilon) * scale + bias over the last dimension (Ba, Kiros and Hinton 2016)."""

    dim: int
    epsilon: float
    use_bias: bool = True

    def setup(self) -> None:
        dims = (("embed", self.dim),)
        self.scale = self.param("scale", declare(nn.initializers.ones, dims), (self.dim,), jnp.float32)
        if self.use_bias:
            self.bias = self.param("bias", declare(nn.initializers.zeros, dims), (self.dim,), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = flat_on_cpu(x).astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        centred = wide - mean
        variance = (centred * centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled = normal * self.scale
        return (scaled + self.bias if self.use_bias else scaled).astype(x.dtype).reshape(x.shape)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the dimensions `dims` (Zhang and Sennrich 2019).

    With `offset` the factor is 1 + scale, and scale is initialized to 0. Without `use_scale` there is no factor.
    """

    dims: Dims
    epsilon: float
    offset: bool = False
    use_scale: bool = True

    def setup(self) -> None:
        if not self.use_scale:
            return
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        self.scale = self.param("scale", declare(init, self.dims), sizes(self.dims), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = flat_on_cpu(x, len(self.dims)).astype(jnp.float32)
        axes = tuple(range(-len(self.dims), 0))
        normal = wide * jax.lax.rsqrt((wide * wide).mean(axes, keepdims=True) + self.epsilon)
        if not self.use_scale:
            return normal.astype(x.dtype).reshape(x.shape)
        return (normal * (self.scale + 1 if self.offset else self.scale)).astype(x.dtype).reshape(x.shape)
