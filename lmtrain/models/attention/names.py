"""Names of the attention kernels and of their features, and what a run needs of attention. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal

# `auto`, then the modules of this folder with a record `KERNEL`, in the order in which `auto` tries them.
AttentionBackend = Literal["auto", "cudnn", "triton", "cudnn_packed", "tokamax", "splash", "blockwise", "xla"]

# The kernel that supports everything on every device.
PLAIN = "xla"

# All kernels support causal masks and grouped heads. Other features, with their texts for messages:
FEATURES = {
    "window": "a sliding window",
    "cap": "a cap on scores (attention_logit_cap)",
    "alibi": "ALiBi",
    "sinks": "attention sinks (attention_sinks)",
    "segments": "packed documents (data.mask_across_documents)",
    "part": "sequences split over more devices than heads (trainer.context_axis_size)",
    "dropout": "dropout on the attention weights (attn_pdrop)",
    "upcast": "float32 scores (upcast_attn)",
    "float32": "32-bit computation (trainer.mp)",
    "wide_heads": "heads wider than 128",
    "very_wide_heads": "heads wider than 256",
    "narrow_values": "values narrower than keys (latent_attention)",
    "wide_values": "values wider than keys (model.type backpack)",
    "odd_values": "values wider than keys, and wider than 256 without being a multiple of 128 (model.type backpack)",
    "odd_heads": "heads whose width is not a multiple of 8",
    "second_derivatives": "second derivatives (optimizer.type sophia-h)",
}


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What a run needs of attention: `features` are keys of `FEATURES`, `block_size` in tokens, None for any."""

    backend: AttentionBackend
    features: frozenset[str]
    seq_len: int
    block_size: int | None = None
