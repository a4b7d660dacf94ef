"""The base of every settings section: immutable, strict about names, documented field by field."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A group of settings. Unknown names are errors, and values do not change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `true` and `false` for numbers: in Python, `True` equals 1."""
        if info.field_name is not None and _holds_bool(value):
            annotation = str(cls.model_fields[info.field_name].annotation)
            if "bool" not in annotation and "Config" not in annotation and _NUMBER.search(annotation):
                raise PydanticCustomError("bool_as_number", "expected a number, not true or false")
        return value


_NUMBER = re.compile(r"\b(int|float)\b")


def _holds_bool(value: Any) -> bool:
    """Whether the value is a boolean, or a list or map that contains one."""
    if isinstance(value, dict | list | tuple):
        return any(map(_holds_bool, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool)


def by_type(default: str, other: tuple[str, str] | None = None) -> Discriminator:
    """Discriminator that selects one of several kinds of section by `type`; `default` if the section has no `type`.

    `other`: the tag of a kind whose `type` is any text that matches a pattern, and that pattern.
    """

    def type_of(value: Any) -> str:
        name = str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None))
        return other[0] if other is not None and re.match(other[1], name) else name

    return Discriminator(type_of)


def as_base(section: BaseModel, base: type[BaseModel]) -> BaseModel:
    """Convert an instance of a subclass of `base` to `base`, with the same values.

    Raises ValueError if the subclass defines additional settings.
    """
    kind = type(section)
    if kind is base:
        return section
    own = sorted(kind.model_fields.keys() - base.model_fields.keys())
    if own:
        raise ValueError(f"{kind.__name__} adds settings that {base.__name__} does not have: {', '.join(own)}")
    given = {
        name: value
        for name, value in section
        if name in section.model_fields_set or value != base.model_fields[name].get_default(call_default_factory=True)
    }
    return base.model_validate(given)
