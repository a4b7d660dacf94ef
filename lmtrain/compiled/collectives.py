"""The communication of a program: arrays exchanged, devices, number of executions, and bytes.

Bytes on the wire are those that one device sends in a ring: an all-gather or reduce-scatter sends (n - 1) / n of the
full array, an all-reduce twice that, an all-to-all (n - 1) / n of each device's part, a permutation all of it
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtrain.compiled.executions import Execution
from lmtrain.compiled.groups import mesh_axes, parse_groups
from lmtrain.compiled.hlo import Computation, Instruction, Module
from lmtrain.compiled.products import call_target

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip

# Instructions that take no time: between the start and the end of a transfer they hide nothing.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "iota", "send", "recv"),
}


@dataclass(frozen=True)
class Network:
    """How the devices are connected. `mesh` maps axis names to sizes; `islands` has the slice or host of each device.

    Devices of one island are connected by the network `fast`, islands by `slow`.
    """

    mesh: Mapping[str, int]
    islands: Sequence[int]
    fast: str = "ICI"
    slow: str = "DCN"

    @property
    def num_devices(self) -> int:
        return len(self.islands)


@dataclass(frozen=True)
class Collective:
    """One collective of the program, on one device.

    `bytes` is the size of the full array: the result of an all-gather, the input of a reduce-scatter. `times` is the
    number of executions per step, `wire_bytes` the bytes that one device sends in all of these. `per_island` is the
    number of devices of a group in one island; they share its connection to the others.
    """

    kind: str
    devices: int
    axes: tuple[str, ...]
    network: str
    per_island: int
    dtype: str
    bytes: float
    times: float
    wire_bytes: float
    asynchronous: bool
    execution: Execution
    shapes: tuple[tuple[int, ...], ...]


def find_collectives(module: Module, executions: Sequence[Execution], network: Network) -> list[Collective]:
    """Every collective that moves data between devices, in the program's order."""
    found: list[Collective] = []
    # XLA:TPU repeats an asynchronous collective in each fusion that starts, overlaps or ends it
    asynchronous = {_channel(one.instruction) for one in executions if _is_fused_asynchronous(one)} - {None}
    counted: set[str | None] = set()
    for execution in executions:
        one = execution.instruction
        if one.opcode == "send" and (across := _across_slices(execution, network)) is not None:
            found.append(across)
        kind = one.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = _channel(one)
        if channel in asynchronous and channel in counted:
            continue
        hidden = channel in asynchronous or _is_asynchronous(module, execution)
        collective = _collective(execution, kind, network, hidden)
        if collective is not None:
            found.append(collective)
            counted.add(channel)
    return found


def _across_slices(execution: Execution, network: Network) -> Collective | None:
    """A transfer between TPU slices, which XLA writes as a send to its runtime and a receive from it.

    Devices at the same position in each slice exchange their data.
    """
    one, inside = execution.instruction, execution.inside
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
    slices = len(set(network.islands))
    if found is None or slices < 2:
        return None
    kind = found[1].lower().replace("_", "-")
    held = inside.by_name[one.operands[0]].shapes
    first = [network.islands.index(number) for number in sorted(set(network.islands))]
    meeting = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', one.attributes)
    received = {
        other.name
        for other in inside.instructions
        if other.opcode == "recv" and meeting is not None and f'"{meeting[1]}"' in other.attributes
    }
    done = next((other for other in inside.instructions if received & set(other.operands)), None)
    return Collective(
        kind,
        slices,
        mesh_axes(first, network.mesh),
        network.slow,
        1,
        max(held, key=lambda shape: shape.bytes).dtype,
        _whole(kind, sum(shape.bytes for shape in held), slices),
        execution.times,
        _wire(kind, sum(shape.bytes for shape in held), slices) * execution.times,
        done is not None and _works_until(inside, one, done),
        execution,
        tuple(shape.dims for shape in held),
    )


def _wire(kind: str, held: float, devices: int) -> float:
    """Bytes that a device sends in a collective; `held` is the size of its input."""
    share = (devices - 1) / devices
    return {
        "all-gather": held * (devices - 1),
        "all-reduce": 2 * held * share,
        "reduce-scatter": held * share,
        "all-to-all": held * share,
        "ragged-all-to-all": held * share,
    }.get(kind, held)


def _whole(kind: str, held: float, devices: int) -> float:
    return held * devices if kind == "all-gather" else held


def _works_until(inside: Computation, start: Instruction, end: Instruction) -> bool:
    begin, last = (inside.instructions.index(one) for one in (start, end))
    return any(_takes_time(one) for one in inside.instructions[begin + 1 : last])


def _channel(one: Instruction) -> str | None:
    found = re.search(r"channel_id=(\d+)", one.attributes)
    return found[1] if found else None


def _is_fused_asynchronous(execution: Execution) -> bool:
    return execution.instruction.opcode in KINDS and any(
        call_target(one).startswith("AsyncCollective") for one in execution.inside.instructions
    )


def _collective(execution: Execution, kind: str, network: Network, asynchronous: bool) -> Collective | None:
    one, inside = execution.instruction, execution.inside
    groups = parse_groups(one.attributes, network.num_devices)
    group = max(groups, key=len, default=[])
    devices = len(group)
    if devices < 2:
        return None
    operands = inside.operand_shapes(one)
    held = sum(shape.bytes for shape in operands)
    if kind == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # XLA:TPU writes it as a fusion that keeps one slice of an all-reduce
    islands = {network.islands[number] for number in group if number < len(network.islands)}
    return Collective(
        kind,
        devices,
        mesh_axes(group, network.mesh),
        network.slow if len(islands) > 1 else network.fast,
        devices // max(len(islands), 1),
        max(operands, key=lambda shape: shape.bytes).dtype if operands else "",
        _whole(kind, held, devices),
        execution.times,
        _wire(kind, held, devices) * execution.times,
        asynchronous,
        execution,
        tuple(shape.dims for shape in one.shapes),
    )


def _is_asynchronous(module: Module, execution: Execution) -> bool:
    """Whether other work is scheduled between the start and the end of a collective."""
    one, inside = execution.instruction, execution.inside
    if '"is_sync":true' in one.attributes:
        return False
    if one.opcode.endswith("-start"):
        return _works_between(inside, one)
    for (
        caller
    ) in module.computations.values():  # XLA:GPU can also wrap it: async-start calls a computation that contains it
        for start in caller.instructions:
            if start.opcode == "async-start" and start.called("calls") == inside.name:
                return '"is_sync":true' not in start.attributes and _works_between(caller, start)
    return False


def _works_between(inside: Computation, start: Instruction) -> bool:
    names = {start.name}
    begun = False
    for other in inside.instructions:
        if other is start:
            begun = True
        elif begun and names & set(other.operands) and other.opcode.endswith(("-done", "-update")):
            if other.opcode.endswith("-done"):
                return False
            names.add(other.name)
        elif begun and _takes_time(other):
            return True
    return False


def _takes_time(one: Instruction) -> bool:
    if one.opcode in _FREE or one.opcode.endswith(("-start", "-done", "-update")):
        return False
    return call_target(one) not in ("AllocateBuffer", "ConcatBitcast")
