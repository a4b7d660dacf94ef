"""All instructions of a program with their numbers of executions, including those in loops, fusions and calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmtrain.compiled.hlo import Computation, Frame, Instruction, Module
from lmtrain.compiled.loops import trip_count

# Mean trip count of a loop with a computed bound, by its source lines; None if unknown.
Trips = Callable[[list[Frame]], float | None]


@dataclass(frozen=True)
class Execution:
    """`instruction` of `inside` runs `times` per execution of the program. `fusion` is the fusion that contains it."""

    instruction: Instruction
    inside: Computation
    times: float
    fusion: Instruction | None


@dataclass(frozen=True)
class Loop:
    """A loop whose body runs `times` each time it is reached, and `total` times in all."""

    times: float
    total: float
    execution: Execution
    is_known: bool


def walk(module: Module, trips: Trips = lambda stack: None) -> tuple[list[Execution], list[Loop]]:
    """All executions, and the loops. All branches of a conditional count, since they differ from step to step.

    `trips` gives the mean trip count of loops whose bound is computed at run time; if it returns None, the body counts
    once and the loop is marked as not known.
    """
    executions: list[Execution] = []
    loops: list[Loop] = []

    def visit(name: str, times: float, fusion: Instruction | None) -> None:
        inside = module.computations[name]
        for one in inside.instructions:
            execution = Execution(one, inside, times, fusion)
            executions.append(execution)
            if one.opcode == "while":
                count: float | None = trip_count(module, inside, one)
                if count is None:
                    count = trips(module.stack(one.frame))
                number = 1.0 if count is None else count
                loops.append(Loop(number, number * times, execution, count is not None))
                visit(one.called("body") or "", times * number, fusion)
            else:
                for called in _called(one):
                    visit(called, times, one if one.opcode == "fusion" else fusion)

    visit(module.entry, 1.0, None)
    return executions, loops


def _called(one: Instruction) -> Iterator[str]:
    """Computations that an instruction runs once; not those applied to single elements, such as a reduction's."""
    if one.opcode in ("fusion", "async-start"):
        yield from filter(None, [one.called("calls")])
    elif one.opcode == "call":
        yield from filter(None, [one.called("to_apply")])
    elif one.opcode == "conditional":
        branches = one.called_all("branch_computations")
        yield from branches or filter(None, (one.called(f"{side}_computation") for side in ("true", "false")))
