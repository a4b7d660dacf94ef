"""FLOPs of the products in a program: dot, convolution and calls of matrix libraries.

A multiplication and an addition are two operations. On programs without loops the sum equals XLA's own count.
"""

import math
import re

from lmtrain.compiled.hlo import Computation, HloInstruction

_GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
_EIGHT_BITS = ("s8", "f8e4m3fn", "f8e5m2")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def call_target(instruction: HloInstruction) -> str:
    """The target function of a custom call; empty for other instructions."""
    target = instruction.find(r'custom_call_target="([^"]*)"') if instruction.opcode == "custom-call" else None
    return target or ""


def flops(inside: Computation, instruction: HloInstruction) -> float:
    """FLOPs of one execution of an instruction, 0 if it is not a product."""
    if instruction.opcode == "dot":
        contracted = instruction.integers("lhs_contracting_dims")
        return _dot(inside, instruction, contracted)
    if instruction.opcode == "convolution":
        return _convolution(inside, instruction)
    if call_target(instruction).startswith(_GEMM_CALLS):
        numbers = instruction.find(r'"lhs_contracting_dimensions":\[([^\]]*)\]') or ""
        return _dot(inside, instruction, tuple(map(int, re.findall(r"\d+", numbers))))
    return 0.0


def is_8_bit(inside: Computation, instruction: HloInstruction) -> bool:
    """Whether both operands of a product have 8 bits."""
    return all(inside.by_name[name].shapes[0].dtype in _EIGHT_BITS for name in instruction.operands[:2])


def _dot(inside: Computation, instruction: HloInstruction, contracted: tuple[int, ...]) -> float:
    left = inside.by_name[instruction.operands[0]].shapes[0]
    return 2.0 * instruction.shapes[0].size * math.prod(left.dims[dim] for dim in contracted)


def _convolution(inside: Computation, instruction: HloInstruction) -> float:
    """2 x batch x output features x input features of a group x valid positions of the window.

    XLA:TPU turns products into convolutions whose window extends beyond the array; only positions inside count.
    """
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None, instruction.name
    of_input, of_kernel, of_output = labels[1], labels[2], labels[3]
    data, kernel = (inside.by_name[name].shapes[0] for name in instruction.operands[:2])
    result = instruction.shapes[0]
    groups = int(instruction.find(r"\bbatch_group_count=(\d+)") or 1)
    positions = 1
    for axis in range(len(of_input) - 2):
        digit = str(axis)
        positions *= _valid_positions(
            _window(instruction, axis),
            data.dims[of_input.index(digit)],
            kernel.dims[of_kernel.index(digit)],
            result.dims[of_output.index(digit)],
        )
    batch = data.dims[of_input.index("b")] // groups
    # the kernel's input features are already those of one group
    features = kernel.dims[of_kernel.index("i")] * kernel.dims[of_kernel.index("o")]
    return 2.0 * batch * features * positions


def _window(instruction: HloInstruction, axis: int) -> dict[str, tuple[int, ...]]:
    window = instruction.find(r"window=\{([^}]*)\}") or ""
    parts = dict(item.split("=", 1) for item in window.split())
    return {name: tuple(int(part) for part in value.split("x")[axis].split("_")) for name, value in parts.items()}


def _valid_positions(window: dict[str, tuple[int, ...]], size: int, kernel: int, outputs: int) -> int:
    """Pairs of output and kernel positions that hit an element of the input, not padding or a hole of dilation."""
    (stride,), low = window.get("stride", (1,)), window.get("pad", (0, 0))[0]
    (base,), (hole,) = window.get("lhs_dilate", (1,)), window.get("rhs_dilate", (1,))
    last = (size - 1) * base
    total = 0
    for position in range(kernel):
        offset = position * hole - low
        if base == 1:
            # outputs o with 0 <= o * stride + offset <= last
            first = max(-(offset // stride), 0)
            final = min((last - offset) // stride, outputs - 1)
            total += max(final - first + 1, 0)
        else:
            total += sum(
                0 <= output * stride + offset <= last and (output * stride + offset) % base == 0
                for output in range(outputs)
            )
    return total
