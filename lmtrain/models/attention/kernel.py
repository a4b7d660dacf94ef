"""The record of an attention kernel, and the attention of a sequence to itself by the kernel of a name."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax

from lmtrain.models.attention.names import FEATURES, AttentionBackend
from lmtrain.models.attention.options import Options
from lmtrain.models.attention.split import on_each_device, positions_over

# (q [B, H, S, C], k [B, K, S, C], v [B, K, S, D], scale, options) -> [B, H, S, D]
Call = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | float, Options], jax.Array]


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention, which the setting `attn_backend` selects by its name.

    `platform` is cpu, gpu or tpu, None for any. `features` are the supported keys of `FEATURES`. `auto` takes the
    kernel for sequences of at least `auto_from` tokens. `uses_block_size`: it follows `flash_attention_block_size`.
    `is_split`: the compiler splits it over devices, as plain operations; otherwise each device runs it on its part.

    `flops` of the forward and of the backward pass are relative to the two products of the forward pass over the keys
    that queries see; None if the products are in the text of a compiled program, where they are counted. `mean_trips`
    gives the mean trip count of its loops with computed bounds, from the name of the operation, sequence length, block
    size, window, and the number of groups that gather keys (`split.py`). `unavailable` returns why the kernel cannot
    run on a kind of device, or with the installed JAX; empty if it can.
    """

    name: str
    platform: str | None
    features: frozenset[str]
    call: Call
    auto_from: int = 0
    uses_block_size: bool = False
    is_split: bool = False
    flops: tuple[float, float] | None = None
    mean_trips: Callable[[str, int, int | None, int | None, int], float] | None = None
    unavailable: Callable[[str], str] = lambda device_kind: ""

    @property
    def scope(self) -> str:
        """Part of the name of all its operations in a compiled program, those of the backward pass included."""
        return f"{self.name}_attention"


def missing_in_jax(module: str, part: str) -> str:
    """The reason of a kernel that requires a module of JAX, a `part` of it for users; empty if JAX has it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # nor the package that it was in
        found = None
    return "" if found else f"requires {part}, which JAX {jax.__version__} does not have"


def is_hopper_or_later(device_kind: str) -> bool:
    """Whether this is a server GPU of compute capability 9.0 or later, by JAX's name of it."""
    return any(name in device_kind for name in ("H100", "H200", "H800", "H20", "B200", "B300"))


def all_but(*missing: str) -> frozenset[str]:
    """All features except these."""
    return frozenset(FEATURES) - set(missing)


def kernel_of(name: str) -> Kernel:
    """The kernel of a name."""
    kernel: Kernel = importlib.import_module(f"lmtrain.models.attention.{name}").KERNEL
    return kernel


def kernels() -> list[Kernel]:
    """All kernels, in the order in which `auto` tries them."""
    return [kernel_of(name) for name in get_args(AttentionBackend) if name != "auto"]


def self_attend(
    backend: str,
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array,
    scale: jax.Array | float,
    **more: Any,
) -> jax.Array:
    """Attention of a full sequence to itself, by the named kernel; `more` are the fields of `Options`. -> [B, H, S, C]

    The caller has checked that the kernel supports them.
    """
    kernel, options = kernel_of(backend), Options(**more)
    assert options.cap is None or options.slopes is None
    for feature, is_used in options.features.items():
        assert not is_used or feature in kernel.features, f"{backend} attention has no {FEATURES[feature]}"
    with jax.named_scope(kernel.scope):
        is_whole = not positions_over(q_BHSC.shape[2], q_BHSC.shape[1])
        # one random mask for all devices needs the compiler, which gathers what they split
        if kernel.is_split and (is_whole or options.drop is not None):
            return kernel.call(q_BHSC, k_BKSC, v_BKSC, scale, options)
        return on_each_device(lambda q, k, v, own: kernel.call(q, k, v, scale, own), q_BHSC, k_BKSC, v_BKSC, options)
