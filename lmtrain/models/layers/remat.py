"""Gradient checkpointing (recompute values in the backward pass, which trades time for memory), and barriers against
fusions that compute values twice.

A policy defines the values inside a block that are kept between forward and backward pass:

    full             none, only the inputs of the block
    dots             the results of all matrix products, and those of kernels
    dots_no_kernels  the results of all matrix products outside kernels, which run a second time
    dots_no_batch    those of products with weights, not the scores of attention
    save_attention   the outputs of attention
    offload          none; the inputs of the block are kept in host memory

All keep the experts that a router has selected: computed a second time, rounding could select others.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.sharding.local import platform

SAVED_ATTENTION = "attention"
SAVED_EXPERTS = "experts"
SAVED_PRODUCT = "product"
ROUTED = "routed"
BLOCK_INPUT = "block_input"

# JAX's operation for cuDNN's attention: names inside a library's custom derivative cannot be given, and without the
# second output, the sums of each row, the kernel would run again.
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


def _attention_saveable(operation: Any, *args: Any, **params: Any) -> Any:
    by_name = jax.checkpoint_policies.save_only_these_names(SAVED_ATTENTION)
    return operation.name == _CUDNN_FORWARD or by_name(operation, *args, **params)


def _all_of(*policies: Any) -> Any:
    """What any of the policies saves, and the choices of routers."""
    both = jax.checkpoint_policies.save_from_both_policies
    return functools.reduce(both, policies, jax.checkpoint_policies.save_only_these_names(ROUTED))


_EXPERTS = jax.checkpoint_policies.save_only_these_names(SAVED_EXPERTS)


def _floating(policy: Any) -> Any:
    """What the policy saves, except sums of 8-bit integers, which have 32 bits: their scaled value is saved instead."""
    by_name = jax.checkpoint_policies.save_only_these_names(SAVED_PRODUCT)

    def saveable(operation: Any, *args: Any, **params: Any) -> Any:
        if args and jnp.issubdtype(getattr(args[0], "dtype", jnp.float32), jnp.integer):
            return False
        return policy(operation, *args, **params) or by_name(operation, *args, **params)

    return saveable


_POLICIES = {
    "full": _all_of(),
    # the output of a kernel is that of products, too, but no `dot` to JAX
    "dots": _all_of(_floating(jax.checkpoint_policies.dots_saveable), _attention_saveable, _EXPERTS),
    "dots_no_kernels": _all_of(_floating(jax.checkpoint_policies.dots_saveable)),
    "dots_no_batch": _all_of(_floating(jax.checkpoint_policies.dots_with_no_batch_dims_saveable), _EXPERTS),
    "save_attention": _all_of(_attention_saveable),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTED],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def remat(block: type[nn.Module], policy: bool | str, scan: bool, static_argnums: tuple[int, ...]) -> Any:
    """`block` with recomputation of its `__call__` by the policy; False keeps all values, True is `full`."""
    if policy is False:
        return block
    return nn.remat(block, static_argnums=static_argnums, methods=["__call__"], **_settings(policy, scan))


def checkpoint(function: Callable[..., Any], policy: bool | str, scan: bool) -> Callable[..., Any]:
    """`function` with recomputation by the policy, like `remat`."""
    if policy is False:
        return function
    checkpointed: Callable[..., Any] = jax.checkpoint(function, **_settings(policy, scan))
    return checkpointed


def _settings(policy: bool | str, scan: bool) -> dict[str, Any]:
    # prevent_cse is for unrolled code; in a scan it has a cost and no use
    return {"policy": _POLICIES["full" if policy is True else str(policy)], "prevent_cse": not scan}


# Barriers around products on TPUs.
#
# XLA:TPU computes elementwise operations before and after a product, such as a norm, an activation function or the sum
# of the residual stream, in the loop of the product. Where these need many operands, its tiles become small, and the
# product takes up to 1.7 times as long (cycles as the compiler estimates them; figures in BUILD-notes.md). Other
# platforms call a library for products, which fuses nothing.


def unfused(x: jax.Array) -> jax.Array:
    """`x`, stored in memory on TPUs, and so is its gradient."""
    return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


@jax.custom_vjp
def unfused_gradient(x: jax.Array) -> jax.Array:
    """`x`, whose gradient is stored in memory on TPUs."""
    return x


unfused_gradient.defvjp(lambda x: (x, None), lambda _, d_x: (unfused(d_x),))


def computed_again(saved: Any) -> Any:
    """What a backward pass begins with; GPUs then compute other values again instead of reading them from memory, also
    where the compiler sees that the forward pass has computed them."""
    return jax.lax.optimization_barrier(saved) if platform() == "gpu" else saved
