"""A stack of equal blocks with parameters stacked over layers, [N, ...] each.

How the stack runs (one compiled block in a loop, or unrolled; with or without recomputation) never changes the
parameters' layout, nor the results beyond rounding.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from lmtrain.models.layers.adapter import LORA
from lmtrain.models.layers.remat import remat


def stack(block: type[nn.Module], num_layers: int, scan: bool, policy: bool | str) -> Callable[..., Any]:
    """`block` repeated `num_layers` times, with gradient checkpointing by `policy` (see `remat`).

    The block has `__call__(x, layer, deterministic, documents) -> (x, None)` and
    `extend((x, cache), layer, start) -> ((x, cache), None)`; `layer` has a leading layer dimension outside, and none
    inside. The cache is that of all layers, so that each writes its new positions in place.
    """
    block = remat(block, policy, scan, static_argnums=(3,))
    shared = {
        "variable_axes": {"params": 0, LORA: 0, "metrics": 0},  # metrics: values sown for logging
        "split_rngs": {"params": True, "dropout": True, LORA: True},
        "length": num_layers,
        "unroll": 1 if scan else num_layers,
        "metadata_params": {nn.PARTITION_NAME: "layers"},
    }
    return nn.scan(
        block,
        methods={
            "__call__": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
            "extend": {"in_axes": (0, nn.broadcast), **shared},
        },
    )
