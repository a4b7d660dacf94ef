"""The closed set of logical axis names. Any other name is an error.

Parameters and activations have separate names, because FSDP shards the `embed` axis of parameters at rest but not that
of the residual stream.
"""

from collections.abc import Iterable, Mapping, Sequence

PARAMETER_AXES = {
    "embed": "width of the residual stream",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values",
    "senses": "senses of a Backpack",
    "head_dim": "width of one head",
    "qkv": "queries, keys and values, stacked",
    "joined": "two residual streams, as inputs of a matrix",
    "latent": "width of a latent of attention, as inputs of a matrix",
    "to_latent": "width of a latent of attention, as outputs of a matrix",
    "mlp": "width of the MLP",
    "expert": "experts of a mixture",
    "expert_embed": "width of the residual stream, in the matrices of experts",
    "expert_mlp": "width of an expert",
    "router": "experts, as outputs of a router",
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
    "expert": "parts of the batch, of other parameters with FSDP, and of experts (expert parallelism)",
    "context": "parts of every sequence, and of parameters with FSDP (context parallelism)",
    "model": "parts of the model (tensor parallelism)",
}


# Axes that only some runs use, whose size is 1 in others.
_OPTIONAL = ("expert", "context")


def used_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a mesh without those axes that the run does not use."""
    return {name: size for name, size in sizes.items() if size > 1 or name not in _OPTIONAL}


def as_names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Convert one axis, several axes or None, as in settings and rules, to a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_axes(axes: tuple[str | None, ...], known: dict[str, str]) -> None:
    """Assert that every axis name is known; user input cannot fail here."""
    for axis in axes:
        assert axis is None or axis in known, f"unknown logical axis {axis!r}; one of {sorted(known)}"


class Axes(tuple[str | None, ...]):
    """The logical names of a parameter's dimensions, of which the last `outputs` are those of a matrix, 0 if it is
    none."""

    outputs: int

    def __new__(cls, names: Iterable[str | None], outputs: int = 0) -> "Axes":
        axes = super().__new__(cls, names)
        axes.outputs = outputs
        return axes
