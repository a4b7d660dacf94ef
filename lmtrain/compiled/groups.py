"""The groups of devices of a collective: parses all forms of XLA's `replica_groups`."""

import math
import re
from collections.abc import Mapping

import numpy as np

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
