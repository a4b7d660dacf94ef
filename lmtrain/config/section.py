"""The base of every settings section: immutable, strict about names, documented field by field; and the kinds of
settings (identity, tunable, execution).

Texts are names, paths and URLs: an empty one, or one with a variable that nothing replaces, is a mistake. Settings with
other texts are declared as `FreeText` or `RawText`.
"""

import os
import re
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lmtrain.runtime.redact import redact

# Declaration of a setting: pydantic's `Field` under the name of the setting's role, which says what depends on it.
#
#     class ScheduleConfig(Section):
#         learning_rate: float = tunable(1e-4, gt=0, description="Peak learning rate")
#
# Arguments are those of `Field`. Only sections at the top level are declared with `Field`: their settings have roles.


class Role(StrEnum):
    """What depends on a setting. The first three roles are part of the run's identity, and so of its run id."""

    ARCHITECTURE = "architecture"
    IDENTITY = "identity"
    TUNABLE = "tunable"
    CHANGEABLE = "changeable"
    EXECUTION = "execution"


# Meaning of each role, for users.
ROLES = {
    Role.ARCHITECTURE: "defines the meaning of the weights; a run never changes it",
    Role.IDENTITY: "distinguishes runs, as data, seed and batch size do; a run never changes it",
    Role.TUNABLE: "part of the run id, but may change once the run has checkpoints; set trainer.id to keep the id",
    Role.CHANGEABLE: "not part of the run id; may change at any start of the run",
    Role.EXECUTION: "as changeable; results do not depend on it, except for rounding",
}


def _declare(role: Role, *default: Any, **constraints: Any) -> Any:
    field = Field(*default, **constraints)
    field.metadata.append(role)  # pydantic keeps metadata of types that it does not know, and ignores them
    return field


architecture = partial(_declare, Role.ARCHITECTURE)
identity = partial(_declare, Role.IDENTITY)
tunable = partial(_declare, Role.TUNABLE)
changeable = partial(_declare, Role.CHANGEABLE)
execution = partial(_declare, Role.EXECUTION)


def role_of(field: FieldInfo) -> Role | None:
    """The role of a setting; None for a section at the top level, whose settings have roles of their own."""
    return next((item for item in field.metadata if isinstance(item, Role)), None)


def settings_of(section: type[BaseModel], *roles: Role) -> set[str]:
    """The names of a section's settings that have one of these roles."""
    return {name for name, field in section.model_fields.items() if role_of(field) in roles}


_FREE, _RAW, _OF_RUN = "free text", "raw text", "of a run"

# Text for a model or a reader: it may be empty.
FreeText = Annotated[str, _FREE]
# Text in which $ and braces mean something, such as a regular expression.
RawText = Annotated[str, _RAW]
# Path in which ${run_id} is replaced.
RunPath = Annotated[str, _OF_RUN]


class Section(BaseModel):
    """A group of settings. Unknown names are errors, and values do not change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `true` and `false` for numbers: in Python, `True` equals 1."""
        if info.field_name is not None and _holds_bool(value):
            annotation = str(cls.model_fields[info.field_name].annotation)
            if "bool" not in annotation and "Config" not in annotation and _NUMBER.search(annotation):
                raise PydanticCustomError("bool_as_number", "expected a number, not true or false")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("expected a whole number below 9e18")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _texts_are_meant(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        kinds = f"{field.annotation} {field.metadata}"
        if _TEXT.search(kinds) and _FREE not in kinds:
            for number, text in enumerate(value if isinstance(value, list) else [value], 1):
                if isinstance(text, str) and (problem := problem_of_text(text, _RAW in kinds, _OF_RUN in kinds)):
                    item = f"item {number} " if isinstance(value, list) else ""
                    null = "; write null for none" if value == text and not text.strip() and "None" in kinds else ""
                    raise PydanticCustomError("text", "{message}", {"message": f"{item}{problem}{null}"})
        return value


_TEXT = re.compile(r"\bstr\b")
_RUN_ID = "${run_id}"
# Variables of shells, of Windows and of templates. Braces with commas and dots are alternatives, which files may have.
_VARIABLE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+|\{\{[^{},]*\}\}|\{%.*?%\}")
_VARIABLE_OF_WINDOWS = re.compile(r"%[A-Za-z_]\w{2,}%")
# In URLs, containers of Azure have names such as $web, and % starts a code.
_VARIABLE_IN_URL = re.compile(r"\$\{[^}]*\}|\$[A-Z][A-Z0-9_]*\b|\{\{[^{},]*\}\}")
_PATH_OF_URL = re.compile(r"://([^?#]*)")


def problem_of_text(text: str, is_raw: bool = False, names_run: bool = False) -> str | None:
    """Why a name, path or URL cannot be meant, for a message that starts with its setting; None if it can.

    It is empty, is no text, has a variable that nothing replaces, or is in an unknown user's home folder.
    """
    if not text.strip():
        return "is empty, as an unset variable of a shell is"
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "is not UTF-8 text, or has a NUL character"
    if is_raw:
        return None
    if text != text.strip():
        return f"begins or ends with white space: {text!r}"
    url = _PATH_OF_URL.search(redact(text))
    left = url[1] if url else text
    if names_run:
        left = left.replace(_RUN_ID, "")
    found = (_VARIABLE_IN_URL if url else _VARIABLE).search(left) or (not url and _VARIABLE_OF_WINDOWS.search(left))
    if found:
        advice = "write its value, or set it on the command line, where the shell replaces variables in double quotes"
        if found[0] == _RUN_ID:
            advice = "only base_path of the checkpointer, log_dir, logdir and hf_save_path may have it"
        elif names_run and found[0] == "$run_id":
            advice = f"write {_RUN_ID}"
        return f"has {found[0]}, which nothing replaces: {advice}"
    if re.match(r"~[A-Za-z_][\w.-]*(/|$)", text) and os.path.expanduser(text) == text:
        user = text.partition("/")[0].removeprefix("~")
        return f"is in the home folder of {user}, but there is no such user; for a file with this name write ./{text}"
    return None


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


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_duration(value: Any) -> timedelta:
    """`"1h30m"` -> 90 minutes. A number without a unit is an error: the unit would be a guess."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float) or (isinstance(value, str) and value.replace(".", "", 1).isdigit()):
        raise PydanticCustomError("duration", "a duration needs a unit, for example 15m; null turns it off")
    text = value.replace(" ", "") if isinstance(value, str) else ""
    parts = _PART.findall(text)
    units = [unit for _, unit in parts]
    if not parts or _PART.sub("", text) or units != [unit for unit in _SECONDS if unit in units]:
        raise PydanticCustomError("duration", "expected a duration such as 90s, 20m, 2h, 1d or 1h30m")
    try:
        return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))
    except OverflowError:
        raise PydanticCustomError("duration", "duration is too long; null turns it off") from None


def format_duration(value: timedelta) -> str:
    """Inverse of `parse_duration`: 5400 seconds -> `1h30m`."""
    rest = value.total_seconds()
    parts = []
    for unit in "dhm":
        count, rest = divmod(rest, _SECONDS[unit])
        if count:
            parts.append(f"{count:.0f}{unit}")
    if rest or not parts:
        text = f"{rest:.6f}".rstrip("0").rstrip(".")
        parts.append(f"{text}s")
    return "".join(parts)


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration, json_schema_input_type=str),
    PlainSerializer(format_duration, return_type=str),
]
