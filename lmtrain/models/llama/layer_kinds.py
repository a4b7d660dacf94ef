"""The kinds of the layers of a Llama, and how they repeat over the depth. Imports no JAX."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, model_serializer, model_validator

from lmtrain.config.section import Section, architecture
from lmtrain.runtime.errors import field_error

Item = TypeVar("Item")


class LayerKind(Section):
    """The kind of a layer. In a config, the name of its attention stands for a kind that is the default otherwise."""

    attention: Literal["full", "sliding", "linear"] = architecture(
        "full",
        description="Keys that a query sees: full: all before it; sliding: the last model.sliding_window; linear: a "
        "state instead of attention (model.linear_attention)",
    )
    rope: bool = architecture(
        True, description="Rotate queries and keys by their positions; false: no positions (NoPE)"
    )
    mlp: Literal["dense", "moe"] | None = architecture(
        None, description="One MLP, or a mixture of experts (model.moe); null: moe if model.moe is set"
    )

    norm_position: Literal["pre", "post"] | None = architecture(
        None, description="Position of the layer's norms (OLMo Hybrid); null: model.norm_position"
    )

    @model_validator(mode="after")
    def _uses_rope(self) -> "LayerKind":
        if self.attention == "linear" and not self.rope:
            raise field_error("rope", "linear layers have no positions to rotate; remove it")
        return self

    @model_serializer(mode="wrap")
    def _as_name(self, write: SerializerFunctionWrapHandler) -> Any:
        return self.attention if self == LayerKind(attention=self.attention) else write(self)


def _from_name(value: Any) -> Any:
    return {"attention": value} if isinstance(value, str) else value


# An entry of a pattern in a config.
LayerEntry = Annotated[
    LayerKind, BeforeValidator(_from_name, json_schema_input_type=Literal["full", "sliding", "linear"] | LayerKind)
]


def shortest_period(items: Sequence[Item]) -> list[Item]:
    """The shortest pattern that gives these items when it repeats, the last time perhaps in part."""
    for size in range(1, len(items)):
        if all(item == items[number % size] for number, item in enumerate(items)):
            return list(items[:size])
    return list(items)


def split_pattern(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """First items, and a pattern that gives the others when it repeats: those with the fewest items together."""
    last_change = max((i for i in range(1, len(items)) if items[i] != items[i - 1]), default=0)
    candidates = [(list(items[:first]), shortest_period(items[first:])) for first in (0, last_change)]
    return min(candidates, key=lambda both: len(both[0]) + len(both[1]))
