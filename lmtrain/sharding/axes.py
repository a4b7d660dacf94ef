"""The closed vocabulary of logical axes. A word that is not here is a mistake, and raises.

Parameters and activations have separate words, because FSDP splits the `embed` axis of parameters at rest while the
residual stream keeps it whole.
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

# What a user calls `mlp` governs the parameters' axis and the activation's; `batch` exists only in activations.
ACTIVATION_OF = {
    "batch": "act_batch",
    "position": "act_seq",
    "embed": "act_embed",
    "heads": "act_heads",
    "kv_heads": "act_kv_heads",
    "senses": "act_senses",
    "mlp": "act_mlp",
    "vocab": "act_vocab",
}

# The words a user writes in mappings.
USER_AXES = {"batch": "sequences of the batch"} | PARAMETER_AXES

MESH_AXES = {
    "replica": "copies of the model",
    "data": "parts of the batch, and of parameters with FSDP",
    "model": "parts of the model (tensor parallelism)",
}


def as_names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Axes as settings and rules give them, one, several or none, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_axes(axes: tuple[str | None, ...], known: dict[str, str]) -> None:
    """Assert that every word is in the vocabulary; only lmtrain's own code can break this."""
    for axis in axes:
        assert axis is None or axis in known, f"unknown logical axis {axis!r}; one of {sorted(known)}"
