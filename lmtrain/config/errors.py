"""The error a user sees when something they wrote or gave is wrong."""

from pydantic_core import PydanticCustomError


class UserError(ValueError):
    """A mistake in a config, an argument or an input file; the message says what, where, and what to do.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on, though its config has no mistake: exit code 1. Its message is for the user."""


def field_error(field: str, message: str) -> PydanticCustomError:
    """For validators of a whole section: a problem of one of its settings, `field` being its dotted name within.

    The report then has the line where that setting was written, not where the section begins.
    """
    return PydanticCustomError("field", "{message}", {"message": message, "field": field})
