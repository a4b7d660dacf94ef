"""The fused kernel of NVIDIA's cuDNN: 16 bits, heads of 8, 16, ... 128, first derivatives; memory grows with the
length."""

import jax

from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.kernel import Kernel


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array | float, options: Options) -> jax.Array:
    """`attend` of a sequence to itself; the kernel takes positions before heads. -> [B, H, S, C]"""
    q, k, v = (part.transpose(0, 2, 1, 3) for part in ((q * scale).astype(q.dtype), k, v))
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="cudnn",
    )
    return mixed.transpose(0, 2, 1, 3)


# Five products backward: it computes the scores again.
KERNEL = Kernel(name="cudnn", platform="gpu", features=frozenset({"window"}), call=cudnn, is_split=True, flops=(3, 2))
