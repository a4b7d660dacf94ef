"""The record of an attention kernel, the choice of one, and the attention of a sequence to itself by it."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from lmtrain.models.attention.attend import Options
from lmtrain.models.attention.names import FEATURES, AttentionBackend, AttentionNeeds
from lmtrain.models.attention.split import Local, on_each_device, positions_over
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

# (q [B, H, S, C], k [B, K, S, C], v [B, K, S, D], scale, options) -> [B, H, S, D]
Call = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | float, Options], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of attention, which the setting `attn_backend` selects by its name.

    `latent` is called with the arrays of `self_attend_latent`; None: `call`, with the keys of all heads joined. Its
    `latent_flops` are as `flops`; None: equal.

    `platform` is cpu, gpu or tpu, None for any. `features` are the supported keys of `FEATURES`. `auto` takes the
    kernel for sequences of at least `auto_from` tokens. `uses_block_size`: it follows `flash_attention_block_size`.
    `is_split`: the compiler splits it over devices, as plain operations; otherwise each device runs it on its part.

    `flops`: the numbers of products in the backward pass with the width of keys, and with that of values; the forward
    pass has one of each. None if the products are in the text of a compiled program, where they are counted.
    `mean_trips` gives the mean trip count of its loops with computed bounds, from the name of the operation, sequence
    length, block size, window, and the number of groups that gather keys (`split.py`). `unavailable` returns why the
    kernel cannot run on a kind of device, or with the installed JAX; empty if it can.
    """

    name: str
    platform: str | None
    features: frozenset[str]
    call: Call
    latent: Call | None = None
    auto_from: int = 0
    uses_block_size: bool = False
    is_split: bool = False
    flops: tuple[int, int] | None = None
    latent_flops: tuple[int, int] | None = None
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


def missing_tokamax() -> str:
    """The reason of a kernel of the package tokamax; empty if it can be used."""
    if jax.__version_info__ < (0, 11, 1):
        return f"requires JAX 0.11.1 or later, got {jax.__version__}"
    return "" if importlib.util.find_spec("tokamax") else "requires tokamax: run `pip install tokamax`"


def is_hopper(device_kind: str) -> bool:
    """Whether this is a server GPU of compute capability 9.0, by JAX's name of it."""
    return any(name in device_kind for name in ("H100", "H200", "H800", "H20"))


def is_hopper_or_later(device_kind: str) -> bool:
    """Whether this is a server GPU of compute capability 9.0 or later, by JAX's name of it."""
    return is_hopper(device_kind) or any(name in device_kind for name in ("B200", "B300"))


# Words of JAX's names of GPUs before compute capability 8.0.
_BEFORE_AMPERE = {"t4", "v100", "p100", "p40", "p4", "k80", "m60", "titan", "gtx", "quadro", "t1000", "t2000"}
_TURING = re.compile(r"20[678]0")


def before_ampere(device_kind: str) -> str:
    """The reason of GPUs that have no bfloat16, nor the compiler of kernels and cuDNN's attention; empty for others."""
    words = re.split(r"[^a-z0-9]+", device_kind.lower())
    is_older = bool(_BEFORE_AMPERE.intersection(words)) or any(map(_TURING.fullmatch, words))
    return f"requires a GPU of compute capability 8.0 or later, got {device_kind}" if is_older else ""


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
    kernel = kernel_of(backend)

    def call(q: jax.Array, keys: tuple[jax.Array, ...], own: Options) -> jax.Array:
        k, v = keys
        return kernel.call(q, k, v, scale, own)

    return _run(kernel, call, q_BHSC, (k_BKSC, v_BKSC), more)


def self_attend_latent(
    backend: str, q_BHSC: jax.Array, kv_BHSE: jax.Array, shared_B1SR: jax.Array, scale: float, **more: Any
) -> jax.Array:
    """`self_attend` of latent attention: `kv` has the keys of each head and then its values, and all heads share
    further dimensions of keys, which the last R of queries meet. -> [B, H, S, V]"""
    kernel = kernel_of(backend)

    def call(q: jax.Array, keys: tuple[jax.Array, ...], own: Options) -> jax.Array:
        kv, shared = keys
        if kernel.latent is not None:
            return kernel.latent(q, kv, shared, scale, own)
        return kernel.call(q, *join_keys(q.shape[-1], kv, shared), scale, own)

    return _run(kernel, call, q_BHSC, (kv_BHSE, shared_B1SR), more)


def join_keys(width: int, kv_BHSE: jax.Array, shared_B1SR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys of this width, whose last dimensions are the shared ones, and the values of latent attention."""
    nope, rope = width - shared_B1SR.shape[-1], shared_B1SR.shape[-1]
    shared = jnp.broadcast_to(shared_B1SR, (*kv_BHSE.shape[:3], rope))
    return jnp.concatenate([kv_BHSE[..., :nope], shared], axis=-1), kv_BHSE[..., nope:]


def _run(kernel: Kernel, local: Local, q: jax.Array, keys: tuple[jax.Array, ...], more: dict[str, Any]) -> jax.Array:
    """`local` on all devices; `more` are the fields of `Options`."""
    options = Options(**more)
    assert options.cap is None or options.slopes is None
    for feature, is_used in options.features.items():
        assert not is_used or feature in kernel.features, f"{kernel.name} attention has no {FEATURES[feature]}"
    with jax.named_scope(kernel.scope):
        is_whole = not positions_over(q.shape[2], q.shape[1])
        # one random mask for all devices needs the compiler, which gathers what they split
        if kernel.is_split and (is_whole or options.drop is not None):
            return local(q, keys, options)
        return on_each_device(local, q, keys, options)


class Choice(NamedTuple):
    """The name of a kernel, and why it was chosen, for the log."""

    name: str
    reason: str


def choose_attention(needs: AttentionNeeds, platform: str, device_kind: str) -> Choice:
    """The kernel to use on a platform, cpu, gpu or tpu, and a kind of device, by JAX's name of it.

    Raises `UserError` if a kernel that is explicitly set does not support the needs or ignores the block size.
    """
    name = needs.backend
    if name != "auto":
        kernel = kernel_of(name)
        if reason := _obstacle(kernel, needs, platform, device_kind):
            raise UserError(f"model.attn_backend: {name} {reason}; set auto to choose one that works")
        if needs.block_size is not None and not kernel.uses_block_size:
            raise UserError(
                f"model.flash_attention_block_size: {needs.block_size}: model.attn_backend {name} has no block size "
                f"to set; remove this setting, or set model.attn_backend: auto"
            )
        return Choice(name, "explicitly set")
    reasons: list[str] = []
    for kernel in _in_order(needs, platform):
        reason = _obstacle(kernel, needs, platform, device_kind)
        if not reason:
            return Choice(kernel.name, "; ".join(reasons) or "fastest on this device")
        reasons.append(f"{kernel.name} {reason}")
    raise AssertionError("the plain kernel supports everything")


def log_attention(choice: Choice, needs: AttentionNeeds, platform: str) -> None:
    """Log the kernel and the reason; a warning if `auto` found no fast kernel, or none with the given block size."""
    kernel = kernel_of(choice.name)
    is_slow = platform != "cpu" and needs.backend == "auto" and kernel.platform is None
    (log.warning if is_slow else log.info)(f"attention: {choice.name} ({choice.reason})")
    if needs.block_size is not None and not kernel.uses_block_size:
        log.warning(f"model.flash_attention_block_size: attention by {choice.name} has no block size to set")


def _in_order(needs: AttentionNeeds, platform: str) -> list[Kernel]:
    """The kernels that `auto` tries, first those that use the given block size."""
    able = [kernel for kernel in kernels() if kernel.platform in (None, platform)]
    if needs.block_size is not None:
        return sorted(able, key=lambda kernel: not kernel.uses_block_size)
    return [kernel for kernel in able if needs.seq_len >= kernel.auto_from]


def _obstacle(kernel: Kernel, needs: AttentionNeeds, platform: str, device_kind: str) -> str:
    """Why this kernel cannot be used; empty if it can."""
    if kernel.platform not in (None, platform):
        return f"requires a {kernel.platform.upper() if kernel.platform else ''}, got a {platform.upper()}"
    missing = [FEATURES[feature] for feature in sorted(needs.features - kernel.features)]
    if missing:
        return f"does not support {', '.join(missing)}"
    too_old = before_ampere(device_kind) if kernel.platform == "gpu" else ""
    return too_old or kernel.unavailable(device_kind)
