"""The base of every settings section: immutable, strict about names, documented field by field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A group of settings. Unknown names are errors, and values do not change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` is not the number 1, though Python thinks so."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = str(cls.model_fields[info.field_name].annotation)
            if "bool" not in annotation and ("int" in annotation or "float" in annotation):
                raise PydanticCustomError("bool_as_number", "expected a number, not true or false")
        return value
