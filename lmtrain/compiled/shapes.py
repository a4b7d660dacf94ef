"""Array types in HLO text: `bf16[12,768]{1,0:T(8,128)(2,1)S(1)}` and tuples of them."""

import math
import re
from dataclasses import dataclass

_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")

# Element types whose name does not contain their width in bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Shape:
    """One array. `space` is the compiler's memory space: 0 is the device's main memory (HBM), others are not."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.size * bits(self.dtype) / 8

    @property
    def hbm_bytes(self) -> float:
        """Bytes in the device's main memory: none if the array is in on-chip or host memory."""
        return 0.0 if self.space else self.bytes


def parse_shapes(text: str) -> list[Shape]:
    """The arrays of a type, in order; a tuple's are flattened."""
    return [
        Shape(
            match["dtype"],
            tuple(int(dim.removeprefix("<=")) for dim in match["dims"].split(",") if dim),
            int(space[1]) if match["layout"] and (space := _SPACE.search(match["layout"])) else 0,
        )
        for match in _ARRAY.finditer(text)
    ]


def bits(dtype: str) -> int:
    """Width of an element type in bits. Complex types are named by their total width: c64 is 64 bits."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8
