"""All instructions of a program with their numbers of executions, including those in loops, fusions and calls."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmtrain.compiled.hlo import Computation, HloInstruction, Module
from lmtrain.compiled.loops import trip_count

# Mean trip count of a loop with a computed bound, by its `op_name`; None if unknown.
Trips = Callable[[str], float | None]

# The package of functions that only communicate, for callers everywhere.
_HELPERS = "sharding/"

# Maximum number of instructions to search for a source line.
_LOOK_BACK = 60


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
            execution = Execution(module, op, inside, times, fusion)
            executions.append(execution)
            if op.opcode == "while":
                count: float | None = trip_count(module, inside, op)
                if count is None:
                    count = trips(op.op_name)
                number = 1.0 if count is None else count
                loops.append(Loop(number, number * times, execution.where, count is not None))
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
