"""All figures of one compiled program, per device and execution."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.compiled.collectives import KINDS, Collective, Network, find_collectives
from lmtrain.compiled.executions import Execution, Loop, Trips, walk
from lmtrain.compiled.hlo import Computation, HloInstruction, Module, Shape, parse_hlo
from lmtrain.compiled.products import call_target, flops, is_8_bit
from lmtrain.runtime.accelerators import Accelerator

# Bytes read from and written to a device's main memory, according to the program's instructions.
#
# Each instruction reads its operands and writes its result once; a fusion counts as one instruction, since its
# intermediate results stay in registers. If an array is only sliced, gathered from or updated in place, only the
# accessed part counts. Caches are not modelled: a GPU, whose cache holds small arrays, may need less traffic. XLA:TPU
# passes the arrays of an asynchronous collective through all fusions that overlap with it: they count where it starts
# and ends.

# Instructions without memory traffic, or whose traffic is that of the instructions inside.
_NONE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
         "partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "async-done", "add-dependency",
         "domain", "get-dimension-size"}  # fmt: skip
_SLICING = ("dynamic-slice", "slice", "gather")
# A fusion computes of these only the elements that it slices.
_ELEMENTWISE = ("convert", "select")


def hbm_bytes(execution: Execution) -> float:
    """Bytes of one execution of an instruction; instructions inside a fusion are counted with the fusion."""
    module, op, inside = execution.module, execution.instruction, execution.inside
    if execution.fusion is not None or op.opcode in _NONE or op.opcode.endswith(("-done", "-update")):
        return 0.0
    if op.opcode == "fusion":
        return _fusion(module, inside, op)
    operands = [_operand(inside, name) for name in op.operands]
    result = sum(shape.hbm_bytes for shape in op.shapes)
    if op.opcode in _SLICING:
        return 2 * result + sum(operands[1:])
    if op.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if op.opcode == "scatter":
        return 3 * sum(operands[len(operands) // 2 + 1 :]) + operands[len(operands) // 2]
    if op.opcode == "slice-start":  # its result is (operands, slice, context)
        part = op.shapes[len(op.operands)]
        return (part.bytes if operands[0] else 0.0) + part.hbm_bytes
    if op.opcode.endswith("-start") and op.opcode != "all-reduce-start":
        return result  # the result includes the operands
    return sum(operands) + result


def _operand(inside: Computation, name: str) -> float:
    operand = inside.by_name.get(name)
    return sum(shape.hbm_bytes for shape in operand.shapes) if operand is not None else 0.0


def _fusion(module: Module, inside: Computation, op: HloInstruction) -> float:
    fused = module.computations[op.called("calls") or ""]
    passed = _passed_through(fused)
    total = 0.0
    for number, name in enumerate(op.operands):
        complete = _operand(inside, name)
        parameter = fused.parameters.get(number)
        if complete and parameter is not None and parameter.name not in passed:
            total += min(complete, _read(module, fused, parameter))
    return total + _written(module, fused, op, passed)


def _passed_through(fused: Computation) -> set[str]:
    """Parameters and results of a fusion that belong to an asynchronous collective which it overlaps with or ends."""
    root, calls = fused.root, {op.name: call_target(op) for op in fused.instructions}
    if "AsyncCollectiveStart" in calls.values():
        return set()

    def users(name: str) -> set[str]:
        """Those that compute with a value; the results of a fusion are a tuple."""
        found = {op.name for op in fused.instructions if name in op.operands}
        return found - {root.name} if root.opcode == "tuple" else found

    ends = {name for name, target in calls.items() if target == "AsyncCollectiveDone"}
    collectives = {op.name for op in fused.instructions if op.opcode in KINDS and users(op.name) <= ends} - {root.name}
    if not collectives:
        return set()
    parameters = {op.name for op in fused.parameters.values() if users(op.name) <= collectives | ends}
    return parameters | {name for name in collectives if not users(name)}


def _read(module: Module, fused: Computation, parameter: HloInstruction) -> float:
    """Bytes that a fusion reads of one of its operands."""
    everything = float(sum(shape.bytes for shape in parameter.shapes))
    names, computed = _aliases(fused, parameter.name), _aliases(fused, parameter.name, _ELEMENTWISE)
    if (computed - names) & set(_results(fused)):
        return everything
    updated = _updated_in_place(module, fused)
    total = 0.0
    for user in fused.instructions:
        if user.name in computed or not computed & set(user.operands):
            continue
        if user.opcode in _SLICING and user.operands[0] in computed:
            total += sum(shape.bytes for shape in user.shapes)
        elif (computed - names) & set(user.operands):
            return everything
        elif user.opcode == "fusion":
            nested = module.computations[user.called("calls") or ""]
            numbers = [number for number, name in enumerate(user.operands) if name in names]
            total += sum(_read(module, nested, nested.parameters[number]) for number in numbers)
        elif user.name not in updated or user.operands[0] not in names:
            return everything
    return total


def _aliases(fused: Computation, name: str, more: tuple[str, ...] = ()) -> set[str]:
    """All names of a value: its own, and those of reinterpretations of its bytes, and the results of `more` opcodes."""
    names = {name}
    for op in fused.instructions:
        if op.opcode in ("bitcast", "get-tuple-element", *more) and names & set(op.operands):
            names.add(op.name)
    return names


def _updated_in_place(module: Module, fused: Computation) -> dict[str, float]:
    """The results of a fusion that are partly updated in place: bytes of the updated part, by name."""
    parts_by_name = {}
    for name in _results(fused):
        op = _source(fused, name)
        if op.opcode == "dynamic-update-slice":
            parts_by_name[op.name] = sum(shape.bytes for shape in fused.by_name[op.operands[1]].shapes)
        elif op.opcode == "scatter":
            updates = op.operands[len(op.operands) // 2 + 1 :]
            parts_by_name[op.name] = 2 * sum(
                shape.bytes for update in updates for shape in fused.by_name[update].shapes
            )
        elif op.opcode == "fusion" and len(op.shapes) == 1:
            nested = module.computations[op.called("calls") or ""]
            parts = _updated_in_place(module, nested)
            if parts:
                parts_by_name[op.name] = sum(parts.values())
    return parts_by_name


def _results(fused: Computation) -> list[str]:
    return list(fused.root.operands) if fused.root.opcode == "tuple" else [fused.root.name]


def _source(fused: Computation, name: str) -> HloInstruction:
    """The instruction that computes a result, ignoring changes of its type."""
    op = fused.by_name[name]
    while op.opcode in ("bitcast", "convert", "copy") and op.operands and op.operands[0] in fused.by_name:
        op = fused.by_name[op.operands[0]]
    return op


def _written(module: Module, fused: Computation, op: HloInstruction, passed: set[str]) -> float:
    """Bytes that a fusion writes: its results, or the parts of them that it updates, but for those that it `passed`."""
    updated = _updated_in_place(module, fused)
    return sum(
        min(updated.get(_source(fused, name).name, shape.bytes), shape.bytes)
        for name, shape in zip(_results(fused), op.shapes, strict=False)
        if not shape.space and name not in passed
    )


_CYCLES = r'"estimated_cycles":"(\d+)"'

# Custom calls of the compiler that are not kernels.
_NO_KERNELS = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "SliceId"),
    *("AsyncCollective", "Sharding", "SPMD", "LayoutConstraint", "TopK", "annotate_device_placement", "ZeroCrop"),
    *("MoveToHost", "MoveToDevice", "xla.sdy", "__cublas", "__onednn", "__gpu$TopK"),
)


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products of one source line. `flops` is the sum over all executions; `is_8_bit`: both operands are."""

    where: str
    op_name: str
    flops: float
    is_8_bit: bool


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A call of a kernel, whose FLOPs are not in the program's text."""

    target: str
    where: str
    op_name: str
    times: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one device in one execution of the program; `traffic` has bytes of HBM by source line, `least` those
    of them that remain if everything else is fused into products, kernels and collectives: each reads its operands and
    writes its results once. `cycles` are those that XLA:TPU estimates, without kernels; 0 on other platforms."""

    products: Sequence[Product]
    kernels: Sequence[KernelCall]
    traffic: Mapping[str, float]
    least: Mapping[str, float]
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


def measure(
    text: str,
    network: Network,
    trips: Trips = lambda op_name: None,
    on_chip: Callable[[str, Shape], bool] = lambda where, shape: False,
) -> Figures:
    """Figures of a program from its HLO text. `trips` gives the mean trip counts of loops with computed bounds;
    `on_chip(where, shape)`: whether an operand or result of a product need not be in memory, for `Figures.least`."""
    module = parse_hlo(text)
    executions, loops = walk(module, trips)
    products: list[Product] = []
    kernels: list[KernelCall] = []
    traffic: dict[str, float] = defaultdict(float)
    least: dict[str, float] = defaultdict(float)
    cycles = outside = 0.0
    for execution in executions:
        op, moved = execution.instruction, hbm_bytes(execution)
        outside = moved if execution.fusion is None else outside
        operations = flops(execution.inside, op) * execution.times
        if operations:
            products.append(
                Product(
                    where=execution.where, op_name=op.op_name, flops=operations, is_8_bit=is_8_bit(execution.inside, op)
                )
            )
            arrays = [*(execution.inside.by_name[name].shapes[0] for name in op.operands[:2]), op.shapes[0]]
            kept = sum(shape.hbm_bytes for shape in arrays if not on_chip(execution.where, shape))
            # some of a fusion's arrays are on chip
            least[execution.where] += min(kept, outside) * execution.times
        target = call_target(op)
        is_kernel = bool(target) and not target.startswith(_NO_KERNELS)
        if is_kernel or op.opcode.removesuffix("-start") in KINDS:
            least[execution.where] += moved * execution.times
        if is_kernel:
            kernels.append(KernelCall(target=target, where=execution.where, op_name=op.op_name, times=execution.times))
        traffic[execution.where] += moved * execution.times
        cycles += int(op.find(_CYCLES) or 0) * execution.times
    return Figures(
        products=products,
        kernels=kernels,
        traffic=traffic,
        least=least,
        collectives=find_collectives(executions, network),
        loops=loops,
        cycles=cycles,
    )


# The minimum time of a program on a device, with each resource at its peak rate: the roofline model.
#
# Products, memory traffic and asynchronous communication can overlap; synchronous communication cannot:
# seconds = max(products, HBM, asynchronous wire) + synchronous wire (Williams et al. 2009).


def bound(
    flops: float,
    hbm_bytes: float,
    collectives: Sequence[Collective],
    accelerator: Accelerator,
    eight_bit: float = 0.0,
    products: str | None = None,
) -> dict[str, Any]:
    """Seconds of each resource, `total`, and `limited_by`, the limiting resource: products, hbm or wire.

    `eight_bit` of the FLOPs are of products in the format `products`.

    Between slices, each device has an equal share of the slow network, and the devices of one slice split the bytes
    of a collective, as in hierarchical algorithms.
    """
    asynchronous = sum(_seconds(collective, accelerator) for collective in collectives if collective.asynchronous)
    synchronous = sum(_seconds(collective, accelerator) for collective in collectives if not collective.asynchronous)
    peak = accelerator.peak_flops
    of_products = (flops - eight_bit) / peak + eight_bit / accelerator.eight_bit.get(products or "", peak)
    hbm = hbm_bytes / accelerator.memory_bandwidth
    total = max(of_products, hbm, asynchronous) + synchronous
    wire = asynchronous + synchronous
    rates = {"products": of_products, "hbm": hbm, "wire": wire}
    return rates | {
        "wire_synchronous": synchronous,
        "total": total,
        "limited_by": max(rates, key=lambda name: rates[name]),
    }


def _seconds(collective: Collective, accelerator: Accelerator) -> float:
    if collective.network == accelerator.link:
        return collective.wire_bytes / accelerator.link_bandwidth
    return collective.wire_bytes / collective.per_slice / accelerator.dcn_bandwidth
