"""The kinds of layers of a Llama whose layers differ, and the pattern in which they repeat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, model_serializer

from lmtrain.config.section import Section
from lmtrain.config.setting import architecture

Item = TypeVar("Item")


class LayerKind(Section):
    """The kind of a layer. In a config, the name of its attention stands for a kind that is the default otherwise."""

    attention: Literal["full", "sliding"] = architecture(
        "full", description="Keys that a query sees: full: all before it; sliding: the last model.sliding_window"
    )
    rope: bool = architecture(
        True, description="Rotate queries and keys by their positions; false: no positions (NoPE)"
    )
    mlp: Literal["dense", "moe"] | None = architecture(
        None, description="One MLP, or a mixture of experts (model.moe); null: moe if model.moe is set"
    )

    @model_serializer(mode="wrap")
    def _as_name(self, write: SerializerFunctionWrapHandler) -> Any:
        return self.attention if self == LayerKind(attention=self.attention) else write(self)


def _from_name(value: Any) -> Any:
    return {"attention": value} if isinstance(value, str) else value


# An entry of a pattern in a config.
LayerEntry = Annotated[
    LayerKind, BeforeValidator(_from_name, json_schema_input_type=Literal["full", "sliding"] | LayerKind)
]


def shortest_period(items: Sequence[Item]) -> list[Item]:
    """The shortest pattern that gives these items when it repeats, the last time perhaps in part."""
    for size in range(1, len(items)):
        if all(item == items[number % size] for number, item in enumerate(items)):
            return list(items[:size])
    return list(items)
