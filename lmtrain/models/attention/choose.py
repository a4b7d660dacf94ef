"""The choice of an attention kernel for a run, by what the run needs and by the platform."""

from typing import NamedTuple

from lmtrain.config.errors import UserError
from lmtrain.models.attention.kernel import Kernel, kernel_of, kernels
from lmtrain.models.attention.names import FEATURES, AttentionNeeds
from lmtrain.runtime.logging import log


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
    return kernel.unavailable(device_kind)
