"""Normalization layers. Statistics are float32 for any precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.models.layers.linear import Dims, declare, sizes


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
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        centred = wide - mean
        variance = (centred * centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled = normal * self.scale
        return (scaled + self.bias if self.use_bias else scaled).astype(x.dtype)


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
        wide = x.astype(jnp.float32)
        axes = tuple(range(-len(self.dims), 0))
        normal = wide * jax.lax.rsqrt((wide * wide).mean(axes, keepdims=True) + self.epsilon)
        if not self.use_scale:
            return normal.astype(x.dtype)
        return (normal * (self.scale + 1 if self.offset else self.scale)).astype(x.dtype)
