"""The closed set of logical axis names. Any other name is an error.

Parameters and activations have separate names, because FSDP shards the `embed` axis of parameters at rest but not that
of the residual stream.
"""

from collections.abc import Sequence

PARAMETER_AXES = {
    "embed": "width of the residual stream",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values",
    "senses": "senses of a Backpack",
    "head_dim": "width of one head",
    "qkv": "queries, keys and values, stacked",
    "mlp": "width of the MLP",
    "vocab": "entries of the vocabulary",
    "position": "positions of a learned position table",
    "layers": "blocks, stacked",
    "lora_rank": "rank of LoRA adapters",
}

ACTIVATION_AXES = {
    "act_batch": "sequences of the batch",
    "act_seq": "positions in a sequence",
    "act_stream": "positions of the residual stream, between the blocks",
    "act_embed": "width of the residual stream",
    "act_heads": "attention heads",
    "act_kv_heads": "heads of keys and values",
    "act_senses": "senses of a Backpack",
    "act_mlp": "width of the MLP",
    "act_vocab": "entries of the vocabulary",
}

# Name in user settings -> activation axis. `mlp` in a setting applies to parameters and activations; only activations
# have `batch`.
_SHARED = ("batch", "position", "embed", "heads", "kv_heads", "senses", "mlp", "vocab")
ACTIVATION_OF = {name: "act_seq" if name == "position" else f"act_{name}" for name in _SHARED}

# The axis names allowed in user settings.
USER_AXES = {"batch": "sequences of the batch"} | PARAMETER_AXES

MESH_AXES = {
    "replica": "copies of the model",
    "data": "parts of the batch, and of parameters with FSDP",
    "context": "parts of every sequence, and of parameters with FSDP (context parallelism)",
    "model": "parts of the model (tensor parallelism)",
}


def as_names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Convert one axis, several axes or None, as in settings and rules, to a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_axes(axes: tuple[str | None, ...], known: dict[str, str]) -> None:
    """Assert that every axis name is known; user input cannot fail here."""
    for axis in axes:
        assert axis is None or axis in known, f"unknown logical axis {axis!r}; one of {sorted(known)}"
