"""Topologies: TPU slices by shape or by Google's names, and hosts of GPUs. Does not import JAX."""

import math
import re
from dataclasses import dataclass

from lmtrain.config.counts import counted
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
_MAX_CHIPS = 16 * 16 * 24

# Limit of planned devices: with more, tracing takes minutes.
MAX_DEVICES = 65_536

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
        unit = "slices" if self.accelerator.platform == "tpu" else "hosts"
        return _text(self.shape) if self.slices == 1 else f"{self.slices} {unit} of {_text(self.shape)}"

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
    def slice_ids(self) -> list[int]:
        """Index of the slice or host of each device."""
        return [index // self.per_slice for index in range(self.num_devices)]


def find_topology(
    device: str, topology: str | None = None, devices: int | None = None, hosts: int | None = None, slices: int = 1
) -> Topology:
    """The topology for the flags `--device`, `--topology`, `--devices`, `--hosts` and `--slices`.

    `device` is a kind (h100, v5p) or one of Google's names (v5p-128, v5litepod-16). Without a size: one GPU, or the
    smallest TPU host. Raises `UserError` for unsupported values, with the supported ones.
    """
    kind, cores = _kind(device)
    accelerator = ACCELERATORS[kind]
    if accelerator.platform == "tpu":
        chosen = _tpu_slices(accelerator, cores, topology, devices, hosts, slices)
    elif topology is not None or slices > 1:
        flag = "--slices" if topology is None else "--topology"
        raise UserError(f"{flag}: {kind} is a GPU; use --devices N and --hosts H instead")
    else:
        chosen = _gpu_hosts(accelerator, devices, hosts)
    if chosen.num_devices > MAX_DEVICES:
        raise UserError(f"{chosen.num_devices:,} devices: at most {MAX_DEVICES:,} are supported")
    return chosen


def _kind(device: str) -> tuple[str, int | None]:
    """`v5p-128` -> the kind v5p, and the number 128 of Google's name; other names are kinds without a number."""
    name = device.lower().strip()
    stem, _, number = name.rpartition("-")
    kind, cores = _OTHER_NAMES.get(stem, stem), int(number) if number.isdigit() else None
    if cores is None or kind not in _SHAPES:
        kind, cores = _OTHER_NAMES.get(name, name), None
    if kind not in KINDS:
        hint = suggest_name(kind, KINDS)
        raise UserError(
            f"--device {device}: unknown kind; {f'did you mean {hint}? ' if hint else ''}known: {', '.join(KINDS)}, "
            "and Google's names such as v5p-128, v5litepod-16, v6e-8"
        )
    return kind, cores


def _gpu_hosts(accelerator: Accelerator, devices: int | None, hosts: int | None) -> Topology:
    in_host = accelerator.host_devices
    number = devices or (1 if hosts is None else hosts * in_host)
    hosts = hosts or -(-number // in_host)
    per_host = _divided(number, hosts, "hosts")
    # Google Cloud's a2-megagpu-16g has 16 A100
    most = 16 if accelerator.link == "PCIe" or accelerator.kind.startswith("a100") else 8
    if per_host > most:
        raise UserError(
            f"--hosts {hosts}: no host has {per_host} {accelerator.name}, {most} at most; remove --hosts to use "
            f"{counted(-(-number // in_host), 'host')} of {in_host}"
        )
    return Topology(accelerator, (per_host,), hosts)


def _tpu_slices(
    accelerator: Accelerator,
    cores: int | None,
    topology: str | None,
    devices: int | None,
    hosts: int | None,
    slices: int,
) -> Topology:
    kind = accelerator.kind
    per_chip = _CORES_PER_CHIP.get(kind, 1)
    if topology is not None:
        shape = _parse_shape(kind, topology)
    elif cores is not None:
        shape = _shape_of(kind, cores / per_chip, f"--device {kind}-{cores}")
    elif devices is not None:
        shape = _shape_of(kind, _divided(devices, slices, "slices"), f"--devices {devices}")
    elif hosts is not None:
        shape = _shape_of(kind, hosts * accelerator.host_devices, f"--hosts {hosts}")
    else:
        shape = _SHAPES[kind][0]  # the smallest host
    chosen = Topology(accelerator, shape, slices)
    chips = chosen.per_slice
    counts = (
        (f"--device {kind}-", cores, chips * per_chip, "cores" if per_chip > 1 else "chips"),
        ("--devices ", devices, chosen.num_devices, "chips"),
        ("--hosts ", hosts, max(chips // math.prod(chosen.host_bounds), 1), "hosts"),
    )
    for flag, given, number, unit in counts:
        if given is not None and given != number:
            raise UserError(f"{flag}{given}: {kind} {chosen.name} has {number} {unit}; remove one of the two flags")
    return chosen


def _shape_of(kind: str, chips: float, flag: str) -> tuple[int, ...]:
    """The shape of a slice with the number of chips that `flag` requires."""
    by_size = {math.prod(shape): shape for shape in reversed(_SHAPES[kind])}
    if chips in by_size:
        return by_size[int(chips)]
    raise UserError(f"{flag}: no slice of {kind} has {chips:g} chips; slices: {_listed(kind)}")


def _parse_shape(kind: str, text: str) -> tuple[int, ...]:
    """Parse `4x4x4`, with the sizes in any order. Shapes of v4 and v5p beyond the table are multiples of 4x4x4."""
    sizes = tuple(sorted(int(size) for size in re.findall(r"\d+", text)))
    if re.fullmatch(r"\d+(x\d+){1,2}", text.lower()):
        for shape in _SHAPES[kind]:
            if sorted(shape) == list(sizes):
                return shape
        are_cubes = len(sizes) == 3 and all(size and size % 4 == 0 for size in sizes)
        if kind in _CORES_PER_CHIP and are_cubes and math.prod(sizes) <= _MAX_CHIPS:
            return sizes
    raise UserError(f"--topology {text}: no slice of {kind} has this shape; slices: {_listed(kind)}")


def _listed(kind: str) -> str:
    """The shapes of slices with their number of chips and Google's name."""
    sizes = ((shape, math.prod(shape)) for shape in _SHAPES[kind])
    per_chip = _CORES_PER_CHIP.get(kind, 1)
    return ", ".join(f"{size} ({_text(shape)}, {kind}-{size * per_chip})" for shape, size in sizes)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _divided(number: int, parts: int, unit: str) -> int:
    if number % parts:
        below, above = number // parts * parts, -(-number // parts) * parts
        near = f"{below} or {above}" if below else str(above)
        raise UserError(f"--devices {number}: not divisible by {parts} {unit}; it could be {near}")
    return number // parts
