"""A stack of blocks with parameters stacked over layers, [N, ...] each.

How the stack runs (one compiled period in a loop, or unrolled; with or without recomputation) never changes the
parameters' layout, nor the results beyond rounding.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from lmtrain.models.layers.linear import LORA
from lmtrain.models.layers.pattern import SOWN, PatternStack
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.layers.remat import remat


def stack(
    block: type[nn.Module], pattern: Sequence[tuple[Any, ...]], num_layers: int, scan: bool, policy: bool | str
) -> nn.Module:
    """`num_layers` blocks, with gradient checkpointing by `policy` (see `remat`).

    `pattern` has the arguments of the block for the first layers, such as a config for local and one for global
    attention; it repeats over the depth, the last time perhaps in part.

    The block has `__call__(x, layer, deterministic, documents) -> (x, None)` and
    `extend((x, cache), layer, start, count) -> ((x, cache), None)`; `layer` has a leading layer dimension outside, and
    none inside. The cache is that of all layers, so that each writes its new positions in place.
    """
    if len(pattern) > 1:
        return PatternStack(block, tuple(pattern), num_layers, scan, policy)
    shared = {
        "variable_axes": {"params": 0, LORA: 0, QUANTIZED: 0, **dict.fromkeys(SOWN, 0)},
        "split_rngs": {"params": True, "dropout": True, LORA: True},
        "length": num_layers,
        "unroll": 1 if scan else num_layers,
        "metadata_params": {nn.PARTITION_NAME: "layers"},
    }
    scanned = nn.scan(
        remat(block, policy, scan, static_argnums=(3,)),
        methods={
            "__call__": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
            "extend": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
        },
    )
    module: nn.Module = scanned(*pattern[0])
    return module
