"""Bytes read from and written to a device's main memory, according to the program's instructions.

Each instruction reads its operands and writes its result once; a fusion counts as one instruction, since its
intermediate results stay in registers. If an array is only sliced, gathered from or updated in place, only the accessed
part counts. Caches are not modelled: a GPU, whose cache holds small arrays, may need less traffic.
"""

from lmtrain.compiled.executions import Execution
from lmtrain.compiled.hlo import Computation, Instruction, Module

# Instructions without memory traffic, or whose traffic is that of the instructions inside.
_NONE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
         "partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "async-done", "add-dependency",
         "domain", "get-dimension-size"}  # fmt: skip
_SLICING = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module, execution: Execution) -> float:
    """Bytes of one execution of an instruction; instructions inside a fusion are counted with the fusion."""
    one, inside = execution.instruction, execution.inside
    if execution.fusion is not None or one.opcode in _NONE or one.opcode.endswith(("-done", "-update")):
        return 0.0
    if one.opcode == "fusion":
        return _fusion(module, inside, one)
    operands = [_operand(inside, name) for name in one.operands]
    result = sum(shape.hbm_bytes for shape in one.shapes)
    if one.opcode in _SLICING:
        return 2 * result + sum(operands[1:])
    if one.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if one.opcode == "scatter":
        return 3 * sum(operands[len(operands) // 2 + 1 :]) + operands[len(operands) // 2]
    if one.opcode == "slice-start":  # its result is (operands, slice, context)
        part = one.shapes[len(one.operands)]
        return (part.bytes if operands[0] else 0.0) + part.hbm_bytes
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return result  # the result includes the operands
    return sum(operands) + result


def _operand(inside: Computation, name: str) -> float:
    found = inside.by_name.get(name)
    return sum(shape.hbm_bytes for shape in found.shapes) if found is not None else 0.0


def _fusion(module: Module, inside: Computation, one: Instruction) -> float:
    fused = module.computations[one.called("calls") or ""]
    total = 0.0
    for number, name in enumerate(one.operands):
        whole = _operand(inside, name)
        parameter = fused.parameters.get(number)
        if whole and parameter is not None:
            total += min(whole, _read(module, fused, parameter))
    return total + _written(module, fused, one)


def _read(module: Module, fused: Computation, parameter: Instruction) -> float:
    """Bytes that a fusion reads of one of its operands."""
    updated = _updated_in_place(module, fused)
    total = 0.0
    for user in _users(fused, parameter.name):
        if user.opcode == "fusion":
            within = module.computations[user.called("calls") or ""]
            names = _aliases(fused, parameter.name)
            numbers = [number for number, name in enumerate(user.operands) if name in names]
            total += sum(_read(module, within, within.parameters[number]) for number in numbers)
        elif user.opcode in _SLICING and user.operands[0] in _aliases(fused, parameter.name):
            total += sum(shape.bytes for shape in user.shapes)
        elif user.name in updated and user.operands[0] in _aliases(fused, parameter.name):
            continue
        else:
            return sum(shape.bytes for shape in parameter.shapes)
    return total


def _aliases(fused: Computation, name: str) -> set[str]:
    """All names of a value: its own, and those of reinterpretations of its bytes."""
    names = {name}
    for one in fused.instructions:
        if one.opcode in ("bitcast", "get-tuple-element") and one.operands and one.operands[0] in names:
            names.add(one.name)
    return names


def _users(fused: Computation, name: str) -> list[Instruction]:
    names = _aliases(fused, name)
    return [one for one in fused.instructions if one.name not in names and names & set(one.operands)]


def _updated_in_place(module: Module, fused: Computation) -> dict[str, float]:
    """The results of a fusion that are partly updated in place: bytes of the updated part, by name."""
    found = {}
    for name in _results(fused):
        one = _source(fused, name)
        if one.opcode == "dynamic-update-slice":
            found[one.name] = sum(shape.bytes for shape in fused.by_name[one.operands[1]].shapes)
        elif one.opcode == "scatter":
            updates = one.operands[len(one.operands) // 2 + 1 :]
            found[one.name] = 2 * sum(shape.bytes for update in updates for shape in fused.by_name[update].shapes)
        elif one.opcode == "fusion" and len(one.shapes) == 1:
            within = module.computations[one.called("calls") or ""]
            parts = _updated_in_place(module, within)
            if parts:
                found[one.name] = sum(parts.values())
    return found


def _results(fused: Computation) -> list[str]:
    return list(fused.root.operands) if fused.root.opcode == "tuple" else [fused.root.name]


def _source(fused: Computation, name: str) -> Instruction:
    """The instruction that computes a result, ignoring changes of its type."""
    one = fused.by_name[name]
    while one.opcode in ("bitcast", "convert", "copy") and one.operands and one.operands[0] in fused.by_name:
        one = fused.by_name[one.operands[0]]
    return one


def _written(module: Module, fused: Computation, one: Instruction) -> float:
    """Bytes that a fusion writes: its results, or the parts of them that it updates."""
    updated = _updated_in_place(module, fused)
    return sum(
        min(updated.get(_source(fused, name).name, shape.bytes), shape.bytes)
        for name, shape in zip(_results(fused), one.shapes, strict=False)
        if not shape.space
    )
