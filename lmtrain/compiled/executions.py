"""All instructions of a program with their numbers of executions, including those in loops, fusions and calls."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmtrain.compiled.hlo import Computation, HloInstruction, Module

# Trip counts of `while` loops, as far as they follow from the program's text: the body adds a constant to an element of
# the loop's tuple, and the condition compares it with a constant, or with an element that the body passes on unchanged.
# Both may be inside fusions.

_THROUGH = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-start", "copy-done", "opt-barrier")


def trip_count(module: Module, inside: Computation, loop: HloInstruction) -> int | None:
    """The trip count of `loop`, an instruction of `inside`; None if it depends on computed values.

    XLA:GPU writes the number into the loop's configuration. Otherwise the loop must count a variable from a constant
    by a constant step to a constant bound in its condition.
    """
    known = loop.find(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known is not None:
        return int(known)
    condition, body = (module.computations[loop.called(part) or ""] for part in ("condition", "body"))
    compared = _compared(module, condition)
    if compared is None:
        return None
    index, direction, bound = compared
    begin = _initial(inside, loop, index)
    end = bound if isinstance(bound, int) else _invariant(inside, loop, body, bound[0])
    step = _step(module, body, index)
    if begin is None or end is None or not step:
        return None
    distance = (end - begin) * (1 if step > 0 else -1)
    if direction in ("LE", "GE"):
        distance += 1
    return max(-(-distance // abs(step)), 0)


def _compared(module: Module, condition: Computation) -> tuple[int, str, int | tuple[int]] | None:
    """The tuple index of the loop variable, the direction, and the bound: a constant, or (the index of a value,)."""
    inside, compare = condition, condition.root
    outer: dict[int, HloInstruction] = {}
    if compare.opcode == "fusion":
        outer = {number: condition.by_name[name] for number, name in enumerate(compare.operands)}
        inside = module.computations[compare.called("calls") or ""]
        compare = inside.root
    if compare.opcode != "compare":
        return None

    def resolve(name: str) -> int | tuple[int] | None:
        op, computation = _source(inside, inside.by_name[name]), inside
        if op.opcode == "parameter" and outer:
            op, computation = outer[int(op.arguments)], condition
        value = _constant(computation, op)
        if value is not None:
            return value
        index = op.find(r"index=(\d+)") if op.opcode == "get-tuple-element" else None
        return (int(index),) if index else None

    left, right = (resolve(name) for name in compare.operands[:2])
    direction = compare.find(r"direction=(\w+)") or ""
    if isinstance(left, tuple) and right is not None and direction in ("LT", "LE", "NE", "GT", "GE"):
        return left[0], direction, right
    return None


def _initial(inside: Computation, loop: HloInstruction, index: int) -> int | None:
    """The initial value of an element of the loop's tuple, if it is constant."""
    start = inside.by_name.get(loop.operands[0])
    if start is None or start.opcode != "tuple" or index >= len(start.operands):
        return None
    op = inside.by_name.get(start.operands[index])
    return None if op is None else _constant(inside, op)


def _invariant(inside: Computation, loop: HloInstruction, body: Computation, index: int) -> int | None:
    """The loop-invariant constant at this index."""
    if body.root.opcode != "tuple":
        return None
    kept = body.by_name.get(body.root.operands[index])
    if kept is None or kept.opcode != "get-tuple-element" or f"index={index}" not in kept.attributes:
        return None
    return _initial(inside, loop, index)


def _step(module: Module, body: Computation, index: int) -> int | None:
    """The constant that the body adds to the loop variable."""
    if body.root.opcode != "tuple":
        return None
    inside, op = body, _source(body, body.by_name[body.root.operands[index]])
    if op.opcode == "get-tuple-element" and body.by_name[op.operands[0]].opcode == "fusion":
        return None
    constants: list[int | None] = []
    if op.opcode == "fusion":
        operands = [body.by_name[name] for name in op.operands]
        inside = module.computations[op.called("calls") or ""]
        constants = [_constant(body, operands[number]) for number in inside.parameters]
        op = inside.root
    if op.opcode not in ("add", "subtract"):
        return None
    constants += [_constant(inside, inside.by_name[name]) for name in op.operands]
    steps = [value for value in constants if value is not None]
    return (steps[0] if op.opcode == "add" else -steps[0]) if len(steps) == 1 else None


def _source(inside: Computation, op: HloInstruction) -> HloInstruction:
    """The instruction whose value `op` copies or converts."""
    while op.opcode in _THROUGH and op.operands and op.operands[0] in inside.by_name:
        op = inside.by_name[op.operands[0]]
    return op


def _constant(inside: Computation, op: HloInstruction) -> int | None:
    op = _source(inside, op)
    return int(op.arguments) if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.arguments) else None


# Mean trip count of a loop with a computed bound, by its `op_name`; None if unknown.
Trips = Callable[[str], float | None]

# The package of functions that only communicate, for callers everywhere.
_HELPERS = "sharding/"

# Maximum number of instructions to search for a source line.
_LOOK_BACK = 60


@dataclass(frozen=True, kw_only=True)
class Execution:
    """`instruction` of `inside` runs `times` per execution of the program. `fusion` is the fusion that contains it."""

    module: Module
    instruction: HloInstruction
    inside: Computation
    times: float
    fusion: HloInstruction | None

    @functools.cached_property
    def where(self) -> str:
        """The innermost source line within lmtrain, `models/layers/linear.py:57`; empty if there is none.

        Lines in `_HELPERS` count only if no other is found.

        Instructions that the compiler inserted have no line: they get that of their fusion, or of their operands.
        """
        seen = [self.instruction, *([self.fusion] if self.fusion else [])]
        helper = ""
        for op in seen:
            for frame in self.module.stack(op.frame):
                _, package, path = frame.file.rpartition("lmtrain/")
                # files of other packages in a virtual environment below the package do not count
                if package and "site-packages/" not in path:
                    where = f"{path}:{frame.line}"
                    if not path.startswith(_HELPERS):
                        return where
                    helper = helper or where
            if helper:
                return helper
            if len(seen) < _LOOK_BACK:
                seen += [self.inside.by_name[name] for name in op.operands if name in self.inside.by_name]
        return ""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop whose body runs `times` each time it is reached, and `total` times in all; `where` is its source line."""

    times: float
    total: float
    where: str
    is_known: bool


# Name of a scope for a branch of a conditional that hardly ever runs, which does not count.
RARELY = "rarely"


def walk(module: Module, trips: Trips = lambda op_name: None) -> tuple[list[Execution], list[Loop]]:
    """All executions, and the loops. All branches of a conditional count, since they differ from step to step, except
    those of the scope `RARELY`.

    `trips` gives the mean trip count of loops whose bound is computed at run time; if it returns None, the body counts
    once and the loop is marked as not known.
    """
    executions: list[Execution] = []
    loops: list[Loop] = []

    def visit(name: str, times: float, fusion: HloInstruction | None) -> None:
        inside = module.computations[name]
        for op in inside.instructions:
            execution = Execution(module=module, instruction=op, inside=inside, times=times, fusion=fusion)
            executions.append(execution)
            if op.opcode == "while":
                count: float | None = trip_count(module, inside, op)
                if count is None:
                    count = trips(op.op_name)
                number = 1.0 if count is None else count
                loops.append(
                    Loop(times=number, total=number * times, where=execution.where, is_known=count is not None)
                )
                visit(op.called("body") or "", times * number, fusion)
            else:
                for called in _called(op):
                    if op.opcode != "conditional" or not _is_rare(module.computations[called]):
                        visit(called, times, op if op.opcode == "fusion" else fusion)

    visit(module.entry, 1.0, None)
    return executions, loops


def _is_rare(branch: Computation) -> bool:
    return any(f"/{RARELY}/" in op.op_name for op in branch.instructions)


def _called(op: HloInstruction) -> Iterator[str]:
    """Computations that an instruction runs once; not those applied to single elements, such as a reduction's."""
    if op.opcode in ("fusion", "async-start"):
        yield from filter(None, [op.called("calls")])
    elif op.opcode == "call":
        yield from filter(None, [op.called("to_apply")])
    elif op.opcode == "conditional":
        branches = op.called_all("branch_computations")
        yield from branches or filter(None, (op.called(f"{side}_computation") for side in ("true", "false")))
