"""A stack of equal blocks with parameters stacked over layers, [N, ...] each.

How the stack runs (one compiled block in a loop, or unrolled; recomputed in the backward pass or not) never changes
the parameters' layout, nor the numbers within rounding.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn


def stack(block: type[nn.Module], num_layers: int, scan: bool, remat: bool) -> Callable[..., Any]:
    """`block` repeated `num_layers` times.

    The block has `__call__(x, layer, deterministic, segments) -> (x, None)` and
    `extend(x, layer, cache, start) -> (x, cache)`; `layer` and `cache` have a leading layer dimension outside, and
    none inside.
    """
    if remat:
        # prevent_cse is for unrolled code; in a scan it costs and gives nothing
        block = nn.remat(block, prevent_cse=not scan, static_argnums=(3,), methods=["__call__"])
    shared = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True, "dropout": True},
        "length": num_layers,
        "unroll": 1 if scan else num_layers,
        "metadata_params": {nn.PARTITION_NAME: "layers"},
    }
    return nn.scan(
        block,
        methods={
            "__call__": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
            "extend": {"in_axes": (0, 0, nn.broadcast), "out_axes": 0, **shared},
        },
    )
