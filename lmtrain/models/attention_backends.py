"""Attention backends: their features, and the choice of one for a run. Imports nothing slow.

backend    device  supports                                            memory
xla        any     everything                                          grows with the square of the length
blockwise  any     everything but dropout on the weights               grows with the length
cudnn      GPU     grouped heads, sliding windows; 16 bits only,       grows with the length
                   heads of 8, 16, ... 128, first derivatives
triton     GPU     everything but dropout on the weights, 32 bits,    grows with the length
                   heads wider than 256 and second derivatives
splash     TPU     grouped heads, sliding windows, segments; lengths   grows with the length
                   that are multiples of 128, first derivatives
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lmtrain.config.errors import UserError

FEATURES = {
    "window": "a sliding window",
    "alibi": "ALiBi",
    "segments": "packed documents (data.mask_across_documents)",
    "dropout": "dropout on the attention weights (attn_pdrop)",
    "upcast": "float32 scores (upcast_attn)",
    "float32": "32-bit computation (trainer.mp)",
    "odd_length": "a model.seq_len that is not a multiple of 128",
    "wide_heads": "heads wider than 128",
    "very_wide_heads": "heads wider than 256",
    "wide_values": "values wider than keys (model.type backpack)",
    "odd_values": "values wider than keys, and wider than 256 without being a multiple of 128 (model.type backpack)",
    "odd_heads": "heads whose width is not a multiple of 8",
    "second_derivatives": "second derivatives (optimizer.type sophia-h)",
}


@dataclass(frozen=True)
class Backend:
    """Required platform (None for any) and features; all backends support causal masks and grouped heads."""

    platform: str | None
    features: frozenset[str]


def _all_but(*missing: str) -> frozenset[str]:
    return frozenset(FEATURES) - set(missing)


BACKENDS = {
    "xla": Backend(None, frozenset(FEATURES)),
    "blockwise": Backend(None, _all_but("dropout")),
    "cudnn": Backend("gpu", frozenset({"window", "odd_length"})),
    "triton": Backend("gpu", _all_but("dropout", "float32", "very_wide_heads", "odd_values", "second_derivatives")),
    "splash": Backend(
        "tpu", frozenset({"window", "segments", "float32", "wide_heads", "very_wide_heads", "odd_heads"})
    ),
}

# Backends that `auto` tries, in order. From this length on, the score matrix of xla costs more than blocks do.
_PREFERRED = {"gpu": ("cudnn", "triton"), "tpu": ("splash",), "cpu": ()}
_LONG = 4096


def choose_attention(wanted: str, needs: Iterable[str], platform: str, seq_len: int) -> tuple[str, str]:
    """The backend to use, and why, for the log. `platform` is JAX's: cpu, gpu or tpu.

    Raises `UserError` if an explicitly set backend does not support all `needs`.
    """
    needs = sorted(needs)
    if wanted != "auto":
        reason = _obstacle(wanted, needs, platform)
        if reason:
            raise UserError(f"model.attn_backend: {wanted} {reason}; set auto to choose one that works")
        return wanted, "explicitly set"
    reasons: list[str] = []
    preferred = (*_PREFERRED.get(platform, ()), *(("blockwise",) if seq_len >= _LONG else ()))
    for name in preferred:
        reason = _obstacle(name, needs, platform)
        if not reason:
            return name, "; ".join(reasons) or "fastest on this device"
        reasons.append(f"{name} {reason}")
    return "xla", "; ".join(reasons) or "fastest on this device"


def _obstacle(name: str, needs: Iterable[str], platform: str) -> str:
    """Why this backend cannot be used; empty if it can."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f"requires a {backend.platform.upper() if backend.platform else ''}, got a {platform.upper()}"
    missing = [FEATURES[need] for need in needs if need not in backend.features]
    return f"does not support {', '.join(missing)}" if missing else ""
