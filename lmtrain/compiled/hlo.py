"""Parser of HLO text: computations, their instructions, and source lines."""

import functools
import math
import re
from collections.abc import Mapping
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


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_NAME = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)$")
_ENTRY = re.compile(r"(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, kw_only=True)
class HloInstruction:
    """One line of a computation. `operands` are names of other instructions; `attributes` is the text after them."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def shapes(self) -> list[Shape]:
        """The arrays of the result."""
        return parse_shapes(self.type_text)

    def find(self, pattern: str) -> str | None:
        """The group of a regular expression in the attributes; None if they do not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def called(self, attribute: str) -> str | None:
        """The computation named by an attribute such as `calls`, `body`, `condition`."""
        return self.find(rf"\b{attribute}=%?([\w.\-]+)")

    def called_all(self, attribute: str) -> list[str]:
        """The computations of an attribute that is a list, such as `branch_computations`."""
        names = self.find(rf"\b{attribute}=\{{([^}}]*)\}}")
        return [name.strip().removeprefix("%") for name in names.split(",")] if names else []

    @property
    def op_name(self) -> str:
        """JAX's name of the source operation, `jit(step)/jvp(Model.hidden)/while/body/...`; may be empty."""
        return self.find(r'op_name="([^"]*)"') or ""

    @property
    def frame(self) -> int | None:
        number = self.find(r"stack_frame_id=(\d+)")
        return int(number) if number else None

    def integers(self, attribute: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1,2}`."""
        numbers = self.find(rf"\b{attribute}=\{{([\d,]*)\}}") or ""
        return tuple(int(part) for part in numbers.split(",") if part)


@dataclass(frozen=True)
class Computation:
    """A list of instructions in scheduled order."""

    name: str
    instructions: tuple[HloInstruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, HloInstruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> HloInstruction:
        return next((op for op in self.instructions if op.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> Mapping[int, HloInstruction]:
        """Its parameters by number."""
        return {int(op.arguments): op for op in self.instructions if op.opcode == "parameter"}

    def operand_shapes(self, instruction: HloInstruction) -> list[Shape]:
        """The arrays of all operands."""
        return [shape for name in instruction.operands if name in self.by_name for shape in self.by_name[name].shapes]


@dataclass(frozen=True)
class Frame:
    """A line of a source file; `parent` is the number of the frame that called it, 0 for none."""

    file: str
    line: int
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, Frame]

    def stack(self, frame: int | None) -> list[Frame]:
        """The frames of a call, innermost first."""
        frames: list[Frame] = []
        while frame is not None and frame in self.frames and len(frames) < 100:
            frames.append(self.frames[frame])
            frame = frames[-1].parent
        return frames


def parse_hlo(text: str) -> Module:
    """Parse the text of `compiled.as_text()`. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    name: str | None = None
    table: dict[int, str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if name is not None:
            if line == "}" or line.startswith("}, execution_thread"):
                parsed = (_parse_instruction(op) for op in lines)
                computations[name] = Computation(name, tuple(op for op in parsed if op is not None))
                name, lines = None, []
            elif line.startswith("  ") or not lines:
                lines.append(line)
            else:  # an attribute with line breaks, as kernels have
                lines[-1] += line
        elif (heading := _TABLE.match(line)) is not None:
            table = tables.setdefault(heading[1], {})
        elif table is not None and (numbered := _ENTRY.match(line)) is not None:
            table[int(numbered[1])] = numbered[2]
        elif not line.startswith("HloModule") and (header := _COMPUTATION.match(line)) is not None:
            name, table = header["name"], None
            entry = name if header["entry"] else entry
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    return Module(computations, entry, _frames(tables))


def _parse_instruction(line: str) -> HloInstruction | None:
    named = _NAME.match(line)
    if named is None:
        return None
    end = _end_of_type(line, named.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    return HloInstruction(
        name=named["name"],
        opcode=opcode["opcode"],
        type_text=line[named.end() : end],
        operands=tuple(_OPERAND.findall(arguments)),
        arguments=arguments,
        attributes=line[close + 1 :],
        is_root=named["root"] is not None,
    )


def _end_of_type(line: str, start: int) -> int:
    if line[start] == "(":
        return _closing(line, start) + 1
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(line: str, start: int) -> int:
    """The index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(line)):
        if line[index] == "(":
            depth += 1
        elif line[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(line)


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, Frame]:
    files = {number: name.strip('"') for number, name in tables.get("FileNames", {}).items()}
    locations = {number: _fields(entry) for number, entry in tables.get("FileLocations", {}).items()}
    frames = {}
    for number, entry in tables.get("StackFrames", {}).items():
        fields = _fields(entry)
        location = locations.get(fields.get("file_location_id", 0), {})
        # XLA prints the parent's number plus one; 1 means none
        frames[number] = Frame(
            files.get(location.get("file_name_id", 0), ""),
            location.get("line", 0),
            fields.get("parent_frame_id", 1) - 1,
        )
    return frames


def _fields(entry: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(entry)}
