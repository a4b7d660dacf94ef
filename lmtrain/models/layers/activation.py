"""Activation functions by the names that configs use."""

from collections.abc import Callable
from functools import partial

import jax

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # x Phi(x), by erf
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # by tanh
    "relu": jax.nn.relu,
}
