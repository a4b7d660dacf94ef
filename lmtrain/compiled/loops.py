"""Trip counts of `while` loops, as far as they follow from the program's text."""

import re
from collections.abc import Mapping

from lmtrain.compiled.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_THROUGH = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-start", "copy-done", "opt-barrier")


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """The trip count of `loop`, an instruction of `inside`; None if it depends on computed values.

    XLA:GPU writes the number into the loop's configuration. Otherwise the loop must count a variable from a constant
    by a constant step to a constant bound in its condition.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition, body = (module.computations[loop.called(part) or ""] for part in ("condition", "body"))
    counter = _compared(module, condition)
    if counter is None:
        return None
    index, direction, bound = counter
    initial = _carried(inside, loop, index)
    begin = None if initial is None else _constant(inside, initial)
    last = bound if isinstance(bound, int) else _invariant(inside, loop, body, bound[0])
    step = _step(module, body, index)
    if begin is None or last is None or not step:
        return None
    distance = (last - begin) * (1 if step > 0 else -1)
    if direction in ("LE", "GE"):
        distance += 1
    return max(-(-distance // abs(step)), 0)


def _compared(module: Module, condition: Computation) -> tuple[int, str, int | tuple[int]] | None:
    """The tuple index of the loop variable, the direction, and the bound: a constant, or (the index of a value,)."""
    where: Computation = condition
    compare = condition.root
    outer: Mapping[int, Instruction] = {}
    if compare.opcode == "fusion":
        where = module.computations[compare.called("calls") or ""]
        outer = {number: condition.by_name[name] for number, name in enumerate(compare.operands)}
        compare = where.root
    if compare.opcode != "compare":
        return None

    def resolve(name: str) -> int | tuple[int] | None:
        one = where.by_name[name]
        while one.opcode in _THROUGH:
            one = where.by_name[one.operands[0]]
        home = where
        if one.opcode == "parameter" and outer:
            one, home = outer[int(one.arguments)], condition
        value = _constant(home, one)
        if value is not None:
            return value
        found = re.search(r"index=(\d+)", one.attributes) if one.opcode == "get-tuple-element" else None
        return (int(found[1]),) if found else None

    left, right = (resolve(name) for name in compare.operands[:2])
    found = re.search(r"direction=(\w+)", compare.attributes)
    direction = found[1] if found else ""
    if isinstance(left, tuple) and right is not None and direction in ("LT", "LE", "NE", "GT", "GE"):
        return left[0], direction, right
    return None


def _carried(inside: Computation, loop: Instruction, index: int) -> Instruction | None:
    """The initial value of a loop's variable."""
    start = inside.by_name.get(loop.operands[0])
    if start is None or start.opcode != "tuple" or index >= len(start.operands):
        return None
    return inside.by_name.get(start.operands[index])


def _invariant(inside: Computation, loop: Instruction, body: Computation, index: int) -> int | None:
    """The loop-invariant constant at this index."""
    if body.root.opcode != "tuple":
        return None
    kept = body.by_name.get(body.root.operands[index])
    if kept is None or kept.opcode != "get-tuple-element" or f"index={index}" not in kept.attributes:
        return None
    start = _carried(inside, loop, index)
    return None if start is None else _constant(inside, start)


def _step(module: Module, body: Computation, index: int) -> int | None:
    """The constant that the body adds to the loop variable."""
    if body.root.opcode != "tuple":
        return None
    where, one = body, body.by_name[body.root.operands[index]]
    while one.opcode in _THROUGH:
        one = where.by_name[one.operands[0]]
    if one.opcode == "get-tuple-element" and where.by_name[one.operands[0]].opcode == "fusion":
        return None
    if one.opcode == "fusion":
        fused = module.computations[one.called("calls") or ""]
        outer = {number: body.by_name[name] for number, name in enumerate(one.operands)}
        where, one = fused, fused.root
        constants = [_constant(body, outer[int(p.arguments)]) for p in fused.instructions if p.opcode == "parameter"]
    else:
        constants = []
    if one.opcode not in ("add", "subtract"):
        return None
    constants += [_constant(where, where.by_name[name]) for name in one.operands]
    found = [value for value in constants if value is not None]
    return (found[0] if one.opcode == "add" else -found[0]) if len(found) == 1 else None


def _constant(where: Computation, one: Instruction) -> int | None:
    while one.opcode in _THROUGH and one.operands and one.operands[0] in where.by_name:
        one = where.by_name[one.operands[0]]
    if one.opcode != "constant" or not re.fullmatch(r"-?\d+", one.arguments):
        return None
    return int(one.arguments)
