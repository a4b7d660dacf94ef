"""Weights of experts in MXFP4 (gpt-oss), read as the bfloat16 numbers that they stand for, without rounding.

Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", section 5.3. A tensor NAME [experts, in, out]
is stored as NAME_blocks [experts, out, in / 32, 16], two numbers in a byte, the first in its low bits, and NAME_scales
[experts, out, in / 32]: each number of a block is multiplied by 2 ** (scale - 127).
"""

import functools
from typing import Protocol, TypeVar

import ml_dtypes
import numpy as np

from lmtrain.runtime.errors import UserError

_BLOCKS, _SCALES = "_blocks", "_scales"
_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BIAS = 127


class _Weights(Protocol):
    """Tensors of files: see `lmtrain.hf.weight_files`."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    files: dict[str, str]

    def read(self, name: str) -> np.ndarray: ...

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray: ...


Stored = TypeVar("Stored", bound=_Weights)


def unpacked(stored: Stored) -> "Stored | Mxfp4Weights":
    """The same tensors, those in MXFP4 under their own names. Raises `UserError` if they are not in the format."""
    return Mxfp4Weights(stored) if any(name.endswith(_BLOCKS) for name in stored.shapes) else stored


class Mxfp4Weights:
    """Tensors of `stored`; see `unpacked`."""

    def __init__(self, stored: _Weights):
        self._stored = stored
        self.shapes, self.dtypes, self.files = dict(stored.shapes), dict(stored.dtypes), dict(stored.files)
        self._names = {name.removesuffix(_BLOCKS) for name in stored.shapes if name.endswith(_BLOCKS)}
        for name in self._names:
            experts, out, groups = self._check(name)
            for values in (self.shapes, self.dtypes, self.files):
                del values[name + _BLOCKS], values[name + _SCALES]
            self.shapes[name], self.dtypes[name] = (experts, 32 * groups, out), "bfloat16"
            self.files[name] = stored.files[name + _BLOCKS]

    def _check(self, name: str) -> tuple[int, ...]:
        blocks, scales, stored = name + _BLOCKS, name + _SCALES, self._stored
        if scales not in stored.shapes:
            raise UserError(f"{stored.files[blocks]}: {blocks} has no {scales}")
        shape, types = stored.shapes[scales], {stored.dtypes[blocks], stored.dtypes[scales]}
        if stored.shapes[blocks] != (*shape, 16) or len(shape) != 3 or types != {"uint8"}:
            raise UserError(
                f"{stored.files[blocks]}: {blocks} {list(stored.shapes[blocks])} and {scales} {list(shape)} of "
                f"{' and '.join(sorted(types))} are not MXFP4: [experts, out, in / 32, 16] and [experts, out, in / 32] "
                "of uint8"
            )
        return shape

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.shapes[name][0]) if name in self._names else self._stored.read(name)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """The experts `first` to `last` - 1 of a tensor in MXFP4, [experts, in, out]; else rows as they are stored."""
        if name not in self._names:
            return self._stored.read_rows(name, first, last)
        blocks, scales = (self._stored.read_rows(name + part, first, last) for part in (_BLOCKS, _SCALES))
        _, inputs, outputs = self.shapes[name]
        values = np.empty((last - first, inputs, outputs), ml_dtypes.bfloat16)
        bits = values.view(np.uint16)
        for number, (of_expert, exponents) in enumerate(zip(blocks, scales, strict=True)):
            pairs = _pairs()[exponents[..., None], of_expert]
            bits[number] = pairs.view(np.uint16).reshape(outputs, inputs).T
            if exponents.max(initial=0) > _LARGEST and not np.isfinite(values[number].astype(np.float32)).all():
                raise UserError(
                    f"{self.files[name]}: {name} of expert {first + number} has numbers that are not finite"
                )
        return values


# The largest scale with which all numbers are finite.
_LARGEST = 252


@functools.cache
def _pairs() -> np.ndarray:
    """The two numbers of a byte with a scale, as the bits of two bfloat16: uint32 [scale, byte]. Scale 255 is NaN."""
    numbers = np.concatenate([_NUMBERS, -_NUMBERS])
    byte = np.arange(256)
    both = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        values = np.ldexp(both, np.arange(256)[:, None, None] - _BIAS).astype(ml_dtypes.bfloat16)
    values[255] = np.nan
    return np.ascontiguousarray(values).view(np.uint32)[..., 0]
