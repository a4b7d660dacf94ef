"""Errors with a message for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_core import PydanticCustomError

from lmtrain.config.redact import redact


class UserError(ValueError):
    """A mistake in a config, an argument or an input file; the message says what, where, and what to do.

    The command line prints the message alone, without a traceback, and exits with code 2. Secrets in URLs are masked.
    """

    def __init__(self, message: str):
        super().__init__(redact(message))


class RunError(RuntimeError):
    """A run that cannot continue although its config is valid: exit code 1. The message is for the user."""


class ReadError(RunError):
    """The data cannot be read by this process, for example because memory is exhausted."""


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Begin the message of each `UserError` within with `where`: a setting or a path."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def field_error(field: str, message: str) -> PydanticCustomError:
    """Error of one setting, for validators of a section. `field` is the setting's dotted name within the section.

    The report then shows the line of that setting, not the first line of the section.
    """
    return PydanticCustomError("field", "{message}", {"message": message, "field": field})
