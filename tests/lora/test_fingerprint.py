"""The fingerprint of parameters."""

import jax
import jax.numpy as jnp

from lmtrain.lora.model import fingerprint
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout


def test_the_fingerprint_depends_on_every_value_and_on_the_dtype():
    layout = build_layout(PartitioningConfig())
    params = {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.zeros((4,), jnp.bfloat16)}
    same = fingerprint(jax.tree.map(jnp.copy, params), layout)
    assert fingerprint(params, layout) == same
    others = [
        {**params, "b": jnp.zeros((4,), jnp.bfloat16).at[3].set(1e-30)},
        {**params, "b": jnp.zeros((4,), jnp.float16)},
        {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)[::-1]}, "b": params["b"]},
        {"a": {"other": params["a"]["kernel"]}, "b": params["b"]},
    ]
    assert len({same, *(fingerprint(other, layout) for other in others)}) == 5
