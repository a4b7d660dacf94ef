"""Settings of the transfer between sizes, and the model that they name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator

from lmtrain.config.load import first_problem
from lmtrain.config.section import Section, identity
from lmtrain.config.tree import dotted
from lmtrain.models.base_config import BaseModelConfig
from lmtrain.runtime.errors import field_error, suggest_name

_REQUIRED = ("hidden_dim", "num_layers", "num_heads")
_OTHERS = ("intermediate_dim", "num_kv_heads", "head_dim", "moe")
_OF_EXPERTS = "intermediate_dim"


class TransferConfig(Section):
    """Learning rates and initial values by comparison with a smaller model, for which they were chosen.

    Yang et al. 2022, "Tensor Programs V" (muP), in width; Dey et al. 2025, "Don't be lazy: CompleteP", in depth.
    """

    base: dict[str, Any] = identity(
        {},
        description="Sizes of the model whose learning rate, epsilon and initializer_range this run uses: hidden_dim, "
        "num_layers, num_heads, and intermediate_dim, num_kv_heads, head_dim, moe.intermediate_dim if it has them",
    )

    @field_validator("base")
    @classmethod
    def _sizes_only(cls, base: dict[str, Any]) -> dict[str, Any]:
        known = (*_REQUIRED, *_OTHERS)
        for name in base:
            if name not in known:
                near = suggest_name(name, known)
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(f"{name} is not a size; expected some of {', '.join(known)}{hint}")
        if missing := [name for name in _REQUIRED if name not in base]:
            raise ValueError(f"{missing[0]} is missing")
        if "moe" in base and (not isinstance(base["moe"], dict) or set(base["moe"]) != {_OF_EXPERTS}):
            raise ValueError(f"moe: expected {{{_OF_EXPERTS}: ...}}; the number of experts is the model's")
        return base


def sizes_of(model: BaseModelConfig) -> dict[str, Any]:
    """The `transfer.base` with the sizes of a model, complete so that nothing follows another default."""
    sizes = {name: getattr(model, name, None) for name in (*_REQUIRED, *_OTHERS)}
    if (moe := sizes.pop("moe")) is not None and moe.intermediate_dim:
        sizes["moe"] = {_OF_EXPERTS: moe.intermediate_dim}
    return {name: value for name, value in sizes.items() if value is not None}


ModelT = TypeVar("ModelT", bound=BaseModelConfig)


def base_of(model: ModelT, sizes: Mapping[str, Any]) -> ModelT:
    """The model of `transfer.base`: that of `model` with these sizes. Raises the error of a section."""
    field = "transfer.base"
    given = {name: getattr(model, name) for name in model.model_fields_set}
    settings = {name: value for name, value in given.items() if name not in (*_REQUIRED, *_OTHERS)}
    if needed := [name for name in ("intermediate_dim", "head_dim") if given.get(name) and name not in sizes]:
        raise field_error(field, f"{needed[0]} is missing: the model sets it")
    settings |= {name: value for name, value in sizes.items() if name != "moe"}
    if (moe := given.get("moe")) is not None:
        width = sizes.get("moe", {}).get(_OF_EXPERTS)
        if moe.intermediate_dim and width is None:
            raise field_error(field, f"moe.{_OF_EXPERTS} is missing: the model sets it")
        settings["moe"] = moe.model_dump(exclude_unset=True) | ({} if width is None else {_OF_EXPERTS: width})
    elif "moe" in sizes:
        raise field_error(field, "moe: the model has no experts; remove it")
    try:
        return type(model).model_validate(settings)
    except ValidationError as error:
        path, message, _ = first_problem(error)
        raise field_error(field, f"{dotted(path)}: {message}".removeprefix(": ")) from None
