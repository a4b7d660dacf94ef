"""The communication of a program: arrays exchanged, devices, number of executions, and bytes.

Bytes on the wire are those that one device sends in a ring: an all-gather or reduce-scatter sends (n - 1) / n of the
full array, an all-reduce twice that, an all-to-all (n - 1) / n of each device's part, a permutation all of it
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.compiled.executions import Execution
from lmtrain.compiled.hlo import Computation, HloInstruction
from lmtrain.compiled.products import call_target

_LISTS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?)\))? \{(?P<used>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}")


def parse_groups(attributes: str, num_devices: int) -> list[list[int]]:
    """The groups of devices that exchange data, as device numbers of the program. One group of all devices by default.

    The groups of a permutation are its cycles or chains. Raises ValueError for an unknown form.
    """
    if (pairs := _PAIRS.search(attributes)) is not None:
        return _chains([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1] or "")])
    if (mesh := _MESH.search(attributes)) is not None:
        return _of_mesh(mesh, num_devices)
    if (iota := _IOTA.search(attributes)) is not None:
        rows = _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
        return [[int(number) for number in row] for row in rows.reshape(rows.shape[0], -1)]
    lists = _LISTS.search(attributes)
    if lists is None and "replica_groups=" in attributes:
        raise ValueError(f"unknown form of replica groups: {attributes[attributes.index('replica_groups=') :][:80]}")
    if lists is not None and lists[1]:
        return [list(_numbers(group)) for group in re.findall(r"\{([\d, ]*)\}", lists[1])]
    return [list(range(num_devices))]


def mesh_axes(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of a group differ. Devices are numbered in the mesh's order."""
    if math.prod(mesh.values()) <= max(group):
        return ()
    coordinates = np.array(np.unravel_index(group, tuple(mesh.values())))
    differ = (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, moves in zip(mesh, differ, strict=True) if moves)


def _of_mesh(match: re.Match[str], num_devices: int) -> list[list[int]]:
    """`mesh['a'=2,'b'=4] {'b'}`; `'b':(2)2` is the part of the axis b that has size 2 after one of size 2."""
    axes = [(name, int(size)) for name, size in _AXIS.findall(match["axes"])]
    order = _ORDER.search(match["ids"]) if match["ids"] else None
    ids = np.arange(num_devices) if order is None else _iota(order[1], order[2])
    used = {name: (before, size) for name, before, size in _USED.findall(match["used"])}
    dims: list[int] = []
    inside: list[int] = []
    for name, size in axes:
        if name not in used:
            dims.append(size)
            continue
        before, part = (int(text) if text else 0 for text in used[name])
        sizes = [before, part, size // (before * part)] if part else [size]
        inside.append(len(dims) + (1 if part else 0))
        dims += sizes
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    grid = ids.reshape(dims).transpose([*outside, *inside])
    rows = grid.reshape(-1, math.prod(dims[dim] for dim in inside))
    return [[int(number) for number in row] for row in rows]


def _iota(dims: str, order: str | None) -> np.ndarray:
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return (grid.transpose(_numbers(order)) if order else grid).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _chains(pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Groups of devices that are connected by pairs, directly or indirectly."""
    groups: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = groups.get(source, {source}) | groups.get(target, {target})
        for number in joined:
            groups[number] = joined
    return [list(group) for group in {id(group): sorted(group) for group in groups.values()}.values()]


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip

_CHANNEL = r"channel_id=(\d+)"

# Instructions that take no time: between the start and the end of a transfer they hide nothing.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "iota", "send", "recv"),
}


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the devices are connected. `mesh` maps axis names to sizes; `slice_ids` has the slice or host of each device.

    Devices of one slice are connected by the network `fast`, slices by `slow`.
    """

    mesh: Mapping[str, int]
    slice_ids: Sequence[int]
    fast: str = "ICI"
    slow: str = "DCN"

    @property
    def num_devices(self) -> int:
        return len(self.slice_ids)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program, on one device.

    `bytes` is the size of the full array: the result of an all-gather, the input of a reduce-scatter. `times` is the
    number of executions per step, `wire_bytes` the bytes that one device sends in all of these. `per_slice` is the
    number of devices of a group in one slice; they share its connection to the others. `where` is the source line,
    `op_name` has the scopes.
    """

    kind: str
    devices: int
    axes: tuple[str, ...]
    network: str
    per_slice: int
    dtype: str
    bytes: float
    times: float
    wire_bytes: float
    asynchronous: bool
    where: str
    op_name: str
    shapes: tuple[tuple[int, ...], ...]


def find_collectives(executions: Sequence[Execution], network: Network) -> list[Collective]:
    """Every collective that moves data between devices, in the program's order."""
    collectives: list[Collective] = []
    # XLA:TPU repeats an asynchronous collective in each fusion that starts, overlaps or ends it
    asynchronous = {op.instruction.find(_CHANNEL) for op in executions if _is_fused_asynchronous(op)} - {None}
    counted: set[str | None] = set()
    for execution in executions:
        op = execution.instruction
        if op.opcode == "send" and (across := _across_slices(execution, network)) is not None:
            collectives.append(across)
        kind = op.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = op.find(_CHANNEL)
        if channel in asynchronous and channel in counted:
            continue
        hidden = channel in asynchronous or _is_asynchronous(execution)
        collective = _collective(execution, kind, network, hidden)
        if collective is not None:
            collectives.append(collective)
            counted.add(channel)
    return collectives


def _across_slices(execution: Execution, network: Network) -> Collective | None:
    """A transfer between TPU slices, which XLA writes as a send to its runtime and a receive from it.

    Devices at the same position in each slice exchange their data.
    """
    op, inside = execution.instruction, execution.inside
    transfer = op.find(r'_xla_megascale_transfer_type="(\w+)"')
    slices = len(set(network.slice_ids))
    if transfer is None or slices < 2:
        return None
    kind = transfer.lower().replace("_", "-")
    held = inside.by_name[op.operands[0]].shapes
    first = [network.slice_ids.index(number) for number in sorted(set(network.slice_ids))]
    meeting = op.find(r'_xla_host_transfer_rendezvous="([^"]*)"')
    received = {
        other.name
        for other in inside.instructions
        if other.opcode == "recv" and meeting is not None and f'"{meeting}"' in other.attributes
    }
    done = next((other for other in inside.instructions if received & set(other.operands)), None)
    return Collective(
        kind=kind,
        devices=slices,
        axes=mesh_axes(first, network.mesh),
        network=network.slow,
        per_slice=1,
        dtype=max(held, key=lambda shape: shape.bytes).dtype,
        bytes=_whole(kind, sum(shape.bytes for shape in held), slices),
        times=execution.times,
        wire_bytes=_wire(kind, sum(shape.bytes for shape in held), slices) * execution.times,
        asynchronous=done is not None and _works_until(inside, op, done),
        where=execution.where,
        op_name=op.op_name,
        shapes=tuple(shape.dims for shape in held),
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


def _works_until(inside: Computation, start: HloInstruction, end: HloInstruction) -> bool:
    begin, last = (inside.instructions.index(op) for op in (start, end))
    return any(_takes_time(op) for op in inside.instructions[begin + 1 : last])


def _is_fused_asynchronous(execution: Execution) -> bool:
    return execution.instruction.opcode in KINDS and any(
        call_target(op).startswith("AsyncCollective") for op in execution.inside.instructions
    )


def _collective(execution: Execution, kind: str, network: Network, asynchronous: bool) -> Collective | None:
    op, inside = execution.instruction, execution.inside
    groups = parse_groups(op.attributes, network.num_devices)
    group = max(groups, key=len, default=[])
    devices = len(group)
    if devices < 2:
        return None
    operands = inside.operand_shapes(op)
    held = sum(shape.bytes for shape in operands)
    if kind == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # XLA:TPU writes it as a fusion that keeps one slice of an all-reduce
    slice_ids = {network.slice_ids[number] for number in group if number < len(network.slice_ids)}
    return Collective(
        kind=kind,
        devices=devices,
        axes=mesh_axes(group, network.mesh),
        network=network.slow if len(slice_ids) > 1 else network.fast,
        per_slice=devices // max(len(slice_ids), 1),
        dtype=max(operands, key=lambda shape: shape.bytes).dtype if operands else "",
        bytes=_whole(kind, held, devices),
        times=execution.times,
        wire_bytes=_wire(kind, held, devices) * execution.times,
        asynchronous=asynchronous,
        where=execution.where,
        op_name=op.op_name,
        shapes=tuple(shape.dims for shape in op.shapes),
    )


def _is_asynchronous(execution: Execution) -> bool:
    """Whether other work is scheduled between the start and the end of a collective."""
    op, inside = execution.instruction, execution.inside
    if '"is_sync":true' in op.attributes:
        return False
    if op.opcode.endswith("-start"):
        return _works_between(inside, op)
    # XLA:GPU can also wrap it: async-start calls a computation that contains it
    for caller in execution.module.computations.values():
        for start in caller.instructions:
            if start.opcode == "async-start" and start.called("calls") == inside.name:
                return '"is_sync":true' not in start.attributes and _works_between(caller, start)
    return False


def _works_between(inside: Computation, start: HloInstruction) -> bool:
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


def _takes_time(op: HloInstruction) -> bool:
    if op.opcode in _FREE or op.opcode.endswith(("-start", "-done", "-update")):
        return False
    return call_target(op) not in ("AllocateBuffer", "ConcatBitcast")
