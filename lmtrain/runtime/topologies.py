"""Topologies: TPU slices by shape or by Google's names, and hosts of GPUs. Does not import JAX."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name
from lmtrain.runtime.accelerators import ACCELERATORS, Accelerator

# Kinds that the installed compilers support; NVIDIA's other GPUs run the same program as one of these.
KINDS = ("v4", "v5e", "v5p", "v6e", "a100-40gb", "a100", "h100", "h200", "l4", "l40s", "b200")

_OTHER_NAMES = {"a100-80gb": "a100", "a100-sxm4-40": "a100-40gb", "v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}

# Slice shapes in chips, as offered by Google Cloud; for v4 and v5p, cubes of 4x4x4 up to the listed sizes.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SOLID = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16),
          (8, 16, 16), (16, 16, 16))  # fmt: skip
_SHAPES = {"v4": _SOLID[:-1], "v5p": _SOLID, "v5e": _FLAT, "v6e": _FLAT}

# The largest v5p slice, in chips.
_MOST_CHIPS = 16 * 16 * 24

# Limit of planned devices: with more, tracing takes minutes.
_MOST_DEVICES = 65_536

# In names such as v5p-128, Google counts cores for these kinds (two per chip), and chips for the others.
_CORES_PER_CHIP = {"v4": 2, "v5p": 2}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind. TPU: `slices` slices of `shape` chips; GPU: `slices` hosts with `shape[0]` GPUs each."""

    accelerator: Accelerator
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.slices * self.per_slice

    @property
    def name(self) -> str:
        """`4x4x4`, `2 slices of 4x4x4`, `8`, `2 hosts of 8`."""
        one = "x".join(map(str, self.shape))
        return one if self.slices == 1 else f"{self.slices} {self._unit}s of {one}"

    @property
    def _unit(self) -> str:
        return "slice" if self.accelerator.platform == "tpu" else "host"

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Which dimensions of a TPU slice wrap around. v4 and v5p: all, from 4x4x4; v5e and v6e: those of size 16."""
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return self.shape[0] == 16, self.shape[1] == 16, False

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips per TPU host in each dimension."""
        return (1, 1, 1) if self.shape == (1, 1) else (2, 2, 1)

    @property
    def islands(self) -> list[int]:
        """Index of the slice or host of each device."""
        return [index // self.per_slice for index in range(self.num_devices)]


def find_topology(
    device: str, topology: str | None = None, devices: int | None = None, hosts: int | None = None, slices: int = 1
) -> Topology:
    """The topology for the flags `--device`, `--topology`, `--devices`, `--hosts` and `--slices`.

    `device` is a kind (h100, v5p) or one of Google's names (v5p-128, v5litepod-16). Without a size: one GPU, or the
    smallest TPU host. Raises `UserError` for unsupported values, with the nearest supported ones.
    """
    kind, cores = _kind(device)
    accelerator = ACCELERATORS[kind]
    for flag, value in (("--devices", devices), ("--hosts", hosts), ("--slices", slices)):
        if value is not None and value < 1:
            raise UserError(f"{flag}: expected 1 or more, not {value}")
    if accelerator.platform == "gpu":
        found = _gpus(accelerator, topology, devices, hosts, slices)
    else:
        found = _slice(accelerator, cores, topology, devices, hosts, slices)
    if found.num_devices > _MOST_DEVICES:
        raise UserError(f"{found.num_devices:,} devices: at most {_MOST_DEVICES:,} are supported")
    return found


def _kind(device: str) -> tuple[str, int | None]:
    name = device.lower().strip()
    known = {*KINDS, *_OTHER_NAMES}
    stem, _, number = name.rpartition("-")
    cores = int(number) if number.isdigit() and stem in known and name not in known else None
    base = stem if cores is not None else name
    base = _OTHER_NAMES.get(base, base)
    if base not in KINDS or (cores is not None and base not in _SHAPES):
        hint = suggest_name(base, list(KINDS))
        did_you_mean = f"did you mean {hint}? " if hint else ""
        raise UserError(
            f"--device {device}: unknown kind; {did_you_mean}known: {', '.join(KINDS)}, and Google's names such as "
            "v5p-128, v5litepod-16, v6e-8"
        )
    return base, cores


def _gpus(
    accelerator: Accelerator, topology: str | None, devices: int | None, hosts: int | None, slices: int
) -> Topology:
    if topology is not None:
        raise UserError(f"--topology: {accelerator.kind} is a GPU; use --devices N and --hosts H instead")
    if slices > 1:
        raise UserError(f"--slices: {accelerator.kind} is a GPU; use --hosts H instead")
    number = devices if devices is not None else 1 if hosts is None else hosts * accelerator.host_devices
    hosts = hosts or max(-(-number // accelerator.host_devices), 1)
    if number % hosts:
        raise UserError(f"--devices {number}: not divisible by {hosts} hosts; it could be {_around(number, hosts)}")
    if number // hosts > (most := _most_in_a_host(accelerator)):
        raise UserError(
            f"--hosts {hosts}: no host has {number // hosts} {accelerator.name}, {most} at most; "
            f"remove --hosts to use {-(-number // accelerator.host_devices)} hosts of {accelerator.host_devices}"
        )
    return Topology(accelerator, (number // hosts,), hosts)


def _most_in_a_host(accelerator: Accelerator) -> int:
    """Most GPUs per host: 16 for A100 (Google Cloud's a2-megagpu-16g) and for PCIe cards, else 8."""
    return 16 if accelerator.link == "PCIe" or accelerator.kind.startswith("a100") else 8


def _slice(
    accelerator: Accelerator,
    cores: int | None,
    topology: str | None,
    devices: int | None,
    hosts: int | None,
    slices: int,
) -> Topology:
    kind = accelerator.kind
    shapes = _SHAPES[kind]
    per_chip = _CORES_PER_CHIP.get(kind, 1)
    if topology is not None:
        shape = _parse_shape(kind, topology, shapes)
        chips = math.prod(shape)
        if devices is not None and devices != slices * chips:
            raise UserError(
                f"--topology {topology}: {slices} x {chips} chips are {slices * chips}, not --devices {devices}"
            )
        if cores is not None and cores != per_chip * chips:
            raise UserError(f"--topology {topology}: has {chips} chips, but {kind}-{cores} has {cores // per_chip}")
        return _checked_hosts(Topology(accelerator, shape, slices), hosts)
    wanted: int | None = None
    if cores is not None:
        if cores % per_chip:
            raise UserError(f"--device: {kind}-{cores} counts cores, two per chip, so the number must be even")
        wanted = cores // per_chip
        if devices is not None and devices != wanted * slices:
            raise UserError(f"--devices {devices}: {kind}-{cores} has {wanted} chips; remove one of them")
    elif devices is not None:
        if devices % slices:
            raise UserError(
                f"--devices {devices}: not divisible by {slices} slices; it could be {_around(devices, slices)}"
            )
        wanted = devices // slices
    elif hosts is not None:
        wanted = hosts * accelerator.host_devices
    if wanted is None:
        wanted = math.prod(shapes[0])  # the smallest host
    found = next((shape for shape in shapes if math.prod(shape) == wanted), None)
    if found is None:
        sizes_known = sorted({math.prod(shape) for shape in shapes})
        near = sorted(sizes_known, key=lambda size: abs(size - wanted))[:3]
        listed = ", ".join(f"{size} ({_text(_shape_of(shapes, size))})" for size in sorted(near))
        asked = f"--devices {devices}" if cores is None else f"--device {kind}-{cores}"
        names = f": {', '.join(f'{kind}-{size * per_chip}' for size in sorted(near))}" if cores is not None else ""
        raise UserError(f"{asked}: no slice of {kind} has {wanted} chips; the nearest have {listed}{names}")
    return _checked_hosts(Topology(accelerator, found, slices), hosts)


def _checked_hosts(found: Topology, hosts: int | None) -> Topology:
    there = max(found.per_slice // math.prod(found.host_bounds), 1)
    if hosts is not None and hosts != there:
        raise UserError(f"--hosts {hosts}: a {_text(found.shape)} slice has {there}; remove --hosts")
    return found


def _parse_shape(kind: str, text: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Parse `4x4x4`, with the sizes in any order. Shapes of v4 and v5p beyond the table are multiples of 4x4x4."""
    if re.fullmatch(r"\d+(x\d+){1,2}", text.lower()):
        sizes = tuple(int(part) for part in text.lower().split("x"))
        same = next((shape for shape in shapes if sorted(shape) == sorted(sizes)), None)
        if same is not None:
            return same
        cubes = len(sizes) == 3 and all(size and size % 4 == 0 for size in sizes)
        if kind in _CORES_PER_CHIP and cubes and math.prod(sizes) <= _MOST_CHIPS:
            return tuple(sorted(sizes))
    wanted = math.prod(int(part) for part in re.findall(r"\d+", text)) if re.search(r"\d", text) else 0
    near = sorted(shapes, key=lambda shape: abs(math.prod(shape) - wanted))[:4]
    raise UserError(
        f"--topology {text}: no slice of {kind} has this shape; the nearest are "
        f"{', '.join(_text(shape) for shape in sorted(near, key=math.prod))}"
    )


def _shape_of(shapes: Sequence[tuple[int, ...]], chips: int) -> tuple[int, ...]:
    return next(shape for shape in shapes if math.prod(shape) == chips)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _around(number: int, parts: int) -> str:
    below, above = number // parts * parts, -(-number // parts) * parts
    return f"{below} or {above}" if below else str(above)
