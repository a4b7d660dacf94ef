"""All figures of one compiled program, per device and execution."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtrain.compiled.collectives import Collective, Network, find_collectives
from lmtrain.compiled.executions import Loop, Trips, walk
from lmtrain.compiled.hlo import parse_hlo
from lmtrain.compiled.products import call_target, flops, is_8_bit
from lmtrain.compiled.traffic import hbm_bytes

_CYCLES = r'"estimated_cycles":"(\d+)"'

# Custom calls of the compiler that are not kernels.
_NO_KERNELS = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "SliceId"),
    *("AsyncCollective", "Sharding", "SPMD", "LayoutConstraint", "TopK", "annotate_device_placement", "ZeroCrop"),
    *("MoveToHost", "MoveToDevice", "xla.sdy", "__cublas", "__onednn", "__gpu$TopK"),
)


@dataclass(frozen=True)
class Product:
    """Matrix products of one source line. `flops` is the sum over all executions; `is_8_bit`: both operands are."""

    where: str
    op_name: str
    flops: float
    is_8_bit: bool


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel, whose FLOPs are not in the program's text."""

    target: str
    where: str
    op_name: str
    times: float


@dataclass(frozen=True)
class Figures:
    """Figures of one device in one execution of the program; `traffic` has bytes of HBM by source line, `cycles` are
    those that XLA:TPU estimates, without kernels; 0 on other platforms."""

    products: Sequence[Product]
    kernels: Sequence[KernelCall]
    traffic: Mapping[str, float]
    collectives: Sequence[Collective]
    loops: Sequence[Loop]
    cycles: float

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def hbm_bytes(self) -> float:
        return sum(self.traffic.values())

    @property
    def wire_bytes(self) -> float:
        return sum(collective.wire_bytes for collective in self.collectives)


def measure(text: str, network: Network, trips: Trips = lambda op_name: None) -> Figures:
    """Figures of a program from its HLO text. `trips` gives the mean trip counts of loops with computed bounds."""
    module = parse_hlo(text)
    executions, loops = walk(module, trips)
    products: list[Product] = []
    kernels: list[KernelCall] = []
    traffic: dict[str, float] = defaultdict(float)
    cycles = 0.0
    for execution in executions:
        op = execution.instruction
        operations = flops(execution.inside, op) * execution.times
        if operations:
            products.append(Product(execution.where, op.op_name, operations, is_8_bit(execution.inside, op)))
        target = call_target(op)
        if target and not target.startswith(_NO_KERNELS):
            kernels.append(KernelCall(target, execution.where, op.op_name, execution.times))
        traffic[execution.where] += hbm_bytes(execution) * execution.times
        cycles += int(op.find(_CYCLES) or 0) * execution.times
    return Figures(products, kernels, traffic, find_collectives(executions, network), loops, cycles)
