"""All figures of one compiled program, per device and execution."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtrain.compiled.collectives import Collective, Network, find_collectives
from lmtrain.compiled.executions import Execution, Loop, Trips, walk
from lmtrain.compiled.hlo import Module, parse_hlo
from lmtrain.compiled.products import call_target, flops
from lmtrain.compiled.traffic import hbm_bytes

# Custom calls of the compiler that are not kernels.
_NO_KERNELS = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "SliceId"),
    *("AsyncCollective", "Sharding", "SPMD", "LayoutConstraint", "TopK", "annotate_device_placement", "ZeroCrop"),
    *("MoveToHost", "MoveToDevice", "xla.sdy", "__cublas", "__onednn", "__gpu$TopK"),
)

# Maximum number of instructions to search for a source line.
_LOOK_BACK = 60


@dataclass(frozen=True)
class Product:
    """Matrix products of one source line. `flops` is the sum over all executions."""

    where: str
    op_name: str
    flops: float

    @property
    def is_recomputed(self) -> bool:
        """Whether gradient checkpointing recomputes it in the backward pass."""
        return "rematted_computation" in self.op_name


@dataclass(frozen=True)
class Kernel:
    """A call of a kernel, whose FLOPs are not in the program's text."""

    target: str
    where: str
    op_name: str
    times: float


@dataclass(frozen=True)
class Figures:
    """Figures of one device in one execution of the program. Places are source lines, see `place_of`.

    `traffic` has the bytes of HBM read and written, by place. `places` are those of `collectives`.
    """

    products: Sequence[Product]
    kernels: Sequence[Kernel]
    traffic: Mapping[str, float]
    collectives: Sequence[Collective]
    places: Sequence[str]
    loops: Sequence[Loop]
    loop_places: Sequence[str]

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def hbm_bytes(self) -> float:
        return sum(self.traffic.values())

    @property
    def wire_bytes(self) -> float:
        return sum(collective.wire_bytes for collective in self.collectives)


def measure(
    text: str,
    network: Network,
    trips: Trips = lambda stack: None,
) -> Figures:
    """Figures of a program from its HLO text.

    `trips` gives the mean trip counts of loops with computed bounds.
    """
    module = parse_hlo(text)
    executions, loops = walk(module, trips)
    collectives = find_collectives(module, executions, network)
    products: list[Product] = []
    kernels: list[Kernel] = []
    traffic: dict[str, float] = defaultdict(float)
    for execution in executions:
        one = execution.instruction
        operations = flops(execution.inside, one) * execution.times
        if operations:
            products.append(Product(place_of(module, execution), one.op_name, operations))
        target = call_target(one)
        if target and not target.startswith(_NO_KERNELS):
            kernels.append(Kernel(target, place_of(module, execution), one.op_name, execution.times))
        traffic[place_of(module, execution)] += hbm_bytes(module, execution) * execution.times
    return Figures(
        products,
        kernels,
        traffic,
        collectives,
        [place_of(module, one.execution) for one in collectives],
        loops,
        [place_of(module, one.execution) for one in loops],
    )


def place_of(module: Module, execution: Execution, package: str = "lmtrain/") -> str:
    """The innermost source line within the package, `models/layers/linear.py:57`; empty if there is none.

    Instructions that the compiler inserted have no line: they get that of their fusion, or of their operands.
    """
    seen = [execution.instruction, *([execution.fusion] if execution.fusion else [])]
    for one in seen:
        stack = module.stack(one.frame)
        found = next((frame for frame in stack if _is_of(package, frame.file)), None)
        if found is not None:
            return f"{found.file.rpartition(package)[2]}:{found.line}"
        if len(seen) < _LOOK_BACK:
            seen += [execution.inside.by_name[name] for name in one.operands if name in execution.inside.by_name]
    return ""


def _is_of(package: str, file: str) -> bool:
    """Whether a file belongs to the package; files of other packages in a virtual environment below it do not."""
    return package in file and "site-packages/" not in file.rpartition(package)[2]
