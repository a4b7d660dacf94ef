"""Errors with a message for the user."""

from pydantic_core import PydanticCustomError


class UserError(ValueError):
    """A mistake in a config, an argument or an input file; the message says what, where, and what to do.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot continue although its config is valid: exit code 1. The message is for the user."""


def field_error(field: str, message: str) -> PydanticCustomError:
    """Error of one setting, for validators of a section. `field` is the setting's dotted name within the section.

    The report then shows the line of that setting, not the first line of the section.
    """
    return PydanticCustomError("field", "{message}", {"message": message, "field": field})
