"""The base of every settings section: immutable, strict about names, documented field by field.

Texts are names, paths and URLs: an empty one, or one with a variable that nothing replaces, is a mistake. Settings with
other texts are declared as `FreeText` or `RawText`.
"""

import os
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lmtrain.config.redact import redact

_FREE, _RAW, _OF_RUN = "free text", "raw text", "of a run"

# Text for a model or a reader: it may be empty.
FreeText = Annotated[str, _FREE]
# Text in which $ and braces mean something, such as a regular expression.
RawText = Annotated[str, _RAW]
# Path in which ${run_id} is replaced.
RunPath = Annotated[str, _OF_RUN]


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
