"""Which collectives a compiled program has, read from its text."""

import re
from dataclasses import dataclass

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# `%name = f32[8,16]{1,0} all-gather(`, or `= (f32[8], f32[4]) all-reduce-start(`; a `-done` only waits for it.
_LINE = re.compile(rf"= (?P<result>\([^=]*?\)|\S+) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d+[a-z0-9]*|pred)\[(?P<shape>[\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One of the program: a loop runs those in its body several times. `bytes` are those of its result on a device."""

    kind: str
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


def find_collectives(hlo: str) -> list[Collective]:
    """The collectives of a compiled program's HLO text, in its order."""
    return [_collective(match["kind"], match["result"]) for match in _LINE.finditer(hlo)]


def _collective(kind: str, result: str) -> Collective:
    arrays = [
        (tuple(int(size) for size in array["shape"].split(",") if size), _width(array["type"]))
        for array in _ARRAY.finditer(result)
    ]
    return Collective(
        kind, sum(_product(shape) * width for shape, width in arrays), tuple(shape for shape, _ in arrays)
    )


def _width(element: str) -> int:
    bits = re.search(r"\d+", element)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
