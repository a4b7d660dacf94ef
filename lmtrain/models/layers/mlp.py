"""MLPs and norms of transformer blocks, and activation functions by the names that configs use."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from lmtrain.models.layers.linear import Dims, Linear, add_bias, declare, sizes
from lmtrain.models.layers.remat import computed_again, unfused, unfused_gradient
from lmtrain.sharding.local import flat, split_over
from lmtrain.sharding.placement import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x), by erf
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),  # by tanh
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
        layers = (self.gate, self.up) if self.is_gated else (self.up,)
        products = tuple((layer.without_bias(x), layer.bias if self.use_bias else None) for layer in layers)
        hidden = _activated(self.activation, products)
        mixed = self.down(unfused_gradient(constrain(hidden, *axes)))
        return unfused(mixed.reshape(*leading, *sizes(self.down.outputs)))


# The products with the layer `up`, after those with the gate if there is one, each without its bias, and the bias.
Products = tuple[tuple[jax.Array, jax.Array | None], ...]


def _activate(add: Callable[..., jax.Array], activation: str, products: Products) -> jax.Array:
    """activation(gate) * up, or activation(up)."""
    x, *factor = (y if bias is None else add(y, bias) for y, bias in products)
    y = ACTIVATIONS[activation](x)
    return y * factor[0] if factor else y


# The gradient keeps only the products, so that GPUs write no derivatives in the forward pass for the backward pass.
_plain = functools.partial(_activate, jnp.add)
_activated = jax.custom_vjp(_plain, nondiff_argnums=(0,))


def _activate_backward(activation: str, products: Products, d_y: jax.Array) -> Any:
    return jax.vjp(functools.partial(_activate, add_bias, activation), computed_again(products))[1](d_y)


_activated.defvjp(lambda activation, products: (_plain(activation, products), products), _activate_backward)


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
        bias = self.bias if self.use_bias else None
        return _norm(flat(x), self.scale, bias, self.epsilon, True).reshape(x.shape)


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
        scale = jnp.ones(sizes(self.dims), jnp.float32)
        if self.use_scale:
            scale = self.scale + 1 if self.offset else self.scale
        return rms_norm(x, scale, self.epsilon)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """The norm of `RmsNorm` over the dimensions of `scale`."""
    result: jax.Array = _norm(flat(x, scale.ndim), scale, None, epsilon, False).reshape(x.shape)
    return result


# The gradient reads the input in its own precision: that of JAX stores the normalized input in float32 for the gradient
# of the scale, twice the bytes.


def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float, is_centred: bool) -> jax.Array:
    """`x` over the dimensions of `scale`, minus its mean if it `is_centred`, divided by the root of its mean square."""
    mean, factor = _statistics(x, scale.ndim, epsilon, is_centred)
    scaled = (x.astype(jnp.float32) - mean) * factor * scale
    return (scaled if bias is None else scaled + bias).astype(x.dtype)


# Its rules call no function that has rules, so that the gradient has a derivative in turn, for Sophia's Hessian.
_norm = jax.custom_vjp(_normalize, nondiff_argnums=(3, 4))


def _statistics(x: jax.Array, rank: int, epsilon: float, is_centred: bool) -> tuple[jax.Array, jax.Array]:
    axes, wide = tuple(range(-rank, 0)), x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True) if is_centred else jnp.float32(0)
    return mean, jax.lax.rsqrt(jnp.square(wide - mean).mean(axes, keepdims=True) + epsilon)


def _norm_backward(epsilon: float, is_centred: bool, saved: Any, d_y: jax.Array) -> tuple[Any, ...]:
    """With n the normalized input and g = d_y * scale: (g - mean(g) - n mean(g n)) * factor."""
    x, scale, bias = saved
    axes, rows = tuple(range(-scale.ndim, 0)), tuple(range(x.ndim - scale.ndim))
    mean, factor = computed_again(_statistics(x, scale.ndim, epsilon, is_centred))
    normal, wide = (x.astype(jnp.float32) - mean) * factor, d_y.astype(jnp.float32)
    d_normal = wide * scale
    d_x = d_normal - normal * (d_normal * normal).mean(axes, keepdims=True)
    if is_centred:
        d_x -= d_normal.mean(axes, keepdims=True)
    d_bias = None if bias is None else wide.sum(rows).astype(bias.dtype)
    return (d_x * factor).astype(x.dtype), (wide * normal).sum(rows).astype(scale.dtype), d_bias


_norm.defvjp(lambda x, scale, bias, *static: (_normalize(x, scale, bias, *static), (x, scale, bias)), _norm_backward)
