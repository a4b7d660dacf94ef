"""Barriers around products on TPUs.

XLA:TPU computes elementwise operations before and after a product, such as a norm, an activation function or the sum of
the residual stream, in the loop of the product. Where these need many operands, its tiles become small, and the product
takes up to 1.7 times as long (cycles as the compiler estimates them; figures in BUILD-notes.md). Other platforms call a
library for products, which fuses nothing.
"""

import jax

from lmtrain.sharding.local import platform


def unfused(x: jax.Array) -> jax.Array:
    """`x`, stored in memory on TPUs, and so is its gradient."""
    return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


@jax.custom_vjp
def unfused_gradient(x: jax.Array) -> jax.Array:
    """`x`, whose gradient is stored in memory on TPUs."""
    return x


unfused_gradient.defvjp(lambda x: (x, None), lambda _, d_x: (unfused(d_x),))
