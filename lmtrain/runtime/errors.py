"""Messages for the user: errors, numbers with their nouns, and suggestions for misspelt names."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lmtrain.runtime.redact import redact


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


def field_error(field: str, message: str) -> ValueError:
    """Error of one setting, for validators of a section. `field` is the setting's dotted name within the section.

    The report then shows the line of that setting, not the first line of the section.
    """
    from pydantic_core import PydanticCustomError  # a slow import, which `lmtrain --help` does not need

    return PydanticCustomError("field", "{message}", {"message": message, "field": field})


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step` or `1,000 steps`; `plural` of nouns that take another ending than s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def suggest_name(wrong: str, known: Iterable[str]) -> str | None:
    """The known name closest to `wrong`, or None. A correct last part in the wrong section counts as close."""
    import difflib  # of errors only: `lmtrain --help` does not need it

    names = [name for name in known if not wrong.startswith(f"{name}.")]
    leaf = wrong.rsplit(".", 1)[-1]
    section = wrong[: len(wrong) - len(leaf)]
    # within the right section only the last part is compared: the section is the same anyway
    siblings = {name[len(section) :]: name for name in names if name.startswith(section)}
    close, near = ([siblings[m] for m in difflib.get_close_matches(leaf, siblings, 1, cutoff)] for cutoff in (0.8, 0.6))
    elsewhere = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    if not section:  # the end of a name, without its section: batch_size
        elsewhere += [name for name in names if name.endswith(f"_{leaf}")]
    others = [name for name in names if not (section and name.startswith(section))]
    loose = difflib.get_close_matches(wrong, others, n=1, cutoff=0.7)
    return next(iter(close + elsewhere + near + loose), None)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The two divisors of `number` nearest to `wanted`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:2])
