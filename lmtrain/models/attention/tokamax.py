"""The fused kernel of tokamax on server GPUs from Hopper on: 16 bits, heads of up to 128, also with a cap on scores.

It stands in for `triton` where JAX no longer has that one's backend. tokamax's public function takes packed documents
only as a mask of all pairs, so that `cudnn_packed` has these.
"""

import jax

from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.kernel import Kernel, is_hopper_or_later, missing_tokamax
from lmtrain.sharding.local import platform


def tokamax(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array | float, options: Options) -> jax.Array:
    """`attend` of a sequence to itself; without a GPU by plain operations, for tests. -> [B, H, S, C]"""
    from tokamax import dot_product_attention  # slow to import

    q, k, v = (part.transpose(0, 2, 1, 3) for part in ((q * scale).astype(q.dtype), k, v))
    mixed: jax.Array = dot_product_attention(
        *(q, k, v),
        scale=1.0,
        is_causal=True,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        logits_soft_cap=options.cap,
        implementation="mosaic" if platform() == "gpu" else "xla",
    )
    return mixed.transpose(0, 2, 1, 3)


def _unavailable(device_kind: str) -> str:
    if not is_hopper_or_later(device_kind):
        return f"requires a server GPU from Hopper on (H100, B200, ...), got {device_kind}"
    return missing_tokamax()


# Seven products backward: two of the five are computed twice, once for keys and values and once for queries.
KERNEL = Kernel(
    name="tokamax",
    platform="gpu",
    features=frozenset({"window", "cap", "upcast"}),
    call=tokamax,
    flops=(4, 3),
    unavailable=_unavailable,
)
