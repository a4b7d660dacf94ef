"""Suggestions for misspelt names and for sizes that do not divide."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from lmtrain.config.describe import entry_name, kind_of, sections_of
from lmtrain.config.tree import value_at


def suggest_name(wrong: str, known: Iterable[str]) -> str | None:
    """The known name closest to `wrong`, or None. A correct last part in the wrong section counts as close."""
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


def known_paths(model: type[BaseModel], data: Any) -> list[str]:
    """Dotted names of all settings of `model`; of a union, those of the member that `data` selects by `type`."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(name)
        sections = sections_of(field.annotation)
        entries = {"": value_at(data, (name,))}
        if entry_name(field.annotation) == ".<name>":
            entries = {f"{key}.": entry for key, entry in entries[""].items()} if isinstance(entries[""], dict) else {}
        for key, values in entries.items():
            kind = values.get("type") if isinstance(values, dict) else None
            chosen = [section for section in sections if kind is not None and kind_of(section) == kind]
            for section in chosen or sections:
                paths.extend(f"{name}.{key}{path}" for path in known_paths(section, values))
    return paths


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The two divisors of `number` nearest to `wanted`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:2])
