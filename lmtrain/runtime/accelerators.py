"""Accelerators by kind and by JAX's device name (peak FLOP/s, memory, links), their topologies, and options of XLA.
Does not import JAX.

Figures are the vendors' published ones: peak FLOP/s of dense matrix products, and bandwidths of one device in one
direction. Sources: NVIDIA's data sheets of A100, A10, L4, L40, L40S, H100, H200, GH200, DGX B200, GB200, T4 and
RTX A6000, and white papers of GA102 and AD102; Google
Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e". The bandwidth of a TPU chip is the sum over its links, half of
the published bidirectional figure.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmtrain.runtime.errors import UserError, counted, suggest_name

_GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """A kind of device. `peak_flops` in FLOP/s of 16-bit products, bandwidths in bytes/s, `memory` in bytes;
    `eight_bit`: FLOP/s of products of each 8-bit format that are faster.

    `link` connects the `host_devices` of one host (GPU) or all chips of a slice (TPU); the data center network (DCN)
    connects hosts and slices.
    """

    kind: str
    name: str
    platform: str
    peak_flops: float
    memory: int
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    dcn_bandwidth: float
    host_devices: int
    eight_bit: Mapping[str, float] = field(default_factory=dict)


_PCIE3, _PCIE4, _PCIE5 = ("PCIe", 16e9), ("PCIe", 32e9), ("PCIe", 64e9)
_NVLINK3, _NVLINK4, _NVLINK5 = ("NVLink", 300e9), ("NVLink", 450e9), ("NVLink", 900e9)
_BRIDGE = ("NVLink", 300e9)


# GeForce: products that accumulate in float32 have half of the speed, but for int8.
_ADA = {"fp8": 330e12, "int8": 661e12}


def _both(flops: float) -> dict[str, float]:
    return {"fp8": flops, "int8": flops}


# Network per GPU: 400 Gbit/s in DGX H100, H200 and B200, 200 in DGX A100, 100 assumed for PCIe cards.
ACCELERATORS = {
    accelerator.kind: accelerator
    for accelerator in (
        Accelerator("v4", "TPU v4", "tpu", 275e12, 32 * _GIB, 1228e9, "ICI", 300e9, 6.25e9, 4),
        Accelerator("v5e", "TPU v5e", "tpu", 197e12, 16 * _GIB, 819e9, "ICI", 200e9, 3.125e9, 4, {"int8": 394e12}),
        Accelerator("v5p", "TPU v5p", "tpu", 459e12, 95 * _GIB, 2765e9, "ICI", 600e9, 6.25e9, 4, {"int8": 918e12}),
        Accelerator("v6e", "TPU v6e", "tpu", 918e12, 32 * _GIB, 1638e9, "ICI", 400e9, 12.5e9, 4, {"int8": 1836e12}),
        Accelerator(
            "a100-40gb", "NVIDIA A100 40GB", "gpu", 312e12, 40 * _GIB, 1555e9, *_NVLINK3, 25e9, 8, {"int8": 624e12}
        ),
        Accelerator("a100", "NVIDIA A100 80GB", "gpu", 312e12, 80 * _GIB, 2039e9, *_NVLINK3, 25e9, 8, {"int8": 624e12}),
        Accelerator("h100", "NVIDIA H100", "gpu", 989e12, 80 * _GIB, 3352e9, *_NVLINK4, 50e9, 8, _both(1979e12)),
        Accelerator(
            "h100-nvl", "NVIDIA H100 NVL", "gpu", 835e12, 94 * 10**9, 3938e9, *_BRIDGE, 50e9, 8, _both(1671e12)
        ),
        Accelerator(
            "h100-pcie", "NVIDIA H100 PCIe", "gpu", 756e12, 80 * _GIB, 2039e9, *_PCIE5, 25e9, 8, _both(1513e12)
        ),
        Accelerator("h200", "NVIDIA H200", "gpu", 989e12, 141 * 10**9, 4800e9, *_NVLINK4, 50e9, 8, _both(1979e12)),
        Accelerator("gh200", "NVIDIA GH200", "gpu", 989e12, 96 * 10**9, 4000e9, *_NVLINK4, 50e9, 1, _both(1979e12)),
        Accelerator("b200", "NVIDIA B200", "gpu", 2.25e15, 180 * 10**9, 8000e9, *_NVLINK5, 50e9, 8, _both(4.5e15)),
        Accelerator("gb200", "NVIDIA GB200", "gpu", 2.5e15, 186 * 10**9, 8000e9, *_NVLINK5, 50e9, 4, _both(5e15)),
        Accelerator("l4", "NVIDIA L4", "gpu", 121e12, 24 * 10**9, 300e9, *_PCIE4, 12.5e9, 8, _both(242e12)),
        Accelerator("l40", "NVIDIA L40", "gpu", 181e12, 48 * 10**9, 864e9, *_PCIE4, 12.5e9, 8, _both(362e12)),
        Accelerator("l40s", "NVIDIA L40S", "gpu", 362e12, 48 * 10**9, 864e9, *_PCIE4, 12.5e9, 8, _both(733e12)),
        Accelerator("a10", "NVIDIA A10", "gpu", 125e12, 24 * 10**9, 600e9, *_PCIE4, 12.5e9, 8, {"int8": 250e12}),
        Accelerator("t4", "NVIDIA T4", "gpu", 8.1e12, 16 * 10**9, 320e9, *_PCIE3, 12.5e9, 8),  # no bfloat16: float32
        Accelerator("a6000", "NVIDIA A6000", "gpu", 155e12, 48 * 10**9, 768e9, *_PCIE4, 12.5e9, 8, {"int8": 310e12}),
        Accelerator("3090", "NVIDIA RTX 3090", "gpu", 71e12, 24 * 10**9, 936e9, *_PCIE4, 12.5e9, 8, {"int8": 284e12}),
        Accelerator("4090", "NVIDIA RTX 4090", "gpu", 165e12, 24 * 10**9, 1008e9, *_PCIE4, 12.5e9, 8, _ADA),
        Accelerator("a10g", "NVIDIA A10G", "gpu", 70e12, 24 * 10**9, 600e9, *_PCIE4, 12.5e9, 8, {"int8": 140e12}),
    )
}

# Formats whose products are faster on a kind of device, but not training with them, by the cycles that the compiler
# estimates (BUILD-notes.md): computing scales and converting costs most of what products save.
SLOW_FORMATS = {("v6e", "int8")}

# JAX's names of TPUs that do not have their kind, in lower case.
_TPUS = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e", "tpu v6": "v6e"}


def find_accelerator(device_kind: str) -> Accelerator | None:
    """The accelerator with this JAX device name ("NVIDIA H100 80GB HBM3", "TPU v5 lite") or kind ("h100").

    None if it is unknown. Complete words are compared: an "RTX A1000" is not an A100, a "GB200" is not a B200.
    """
    name = device_kind.lower()
    words = set(re.split(r"[^a-z0-9]+", name))
    kinds = sorted(ACCELERATORS, key=lambda kind: -len(kind))  # h100-nvl before h100
    of_words = next((kind for kind in kinds if words.issuperset(kind.split("-"))), "")
    return ACCELERATORS.get(name) or ACCELERATORS.get(_TPUS.get(name, of_words))


# Kinds that the installed compilers support; NVIDIA's other GPUs run the same program as one of these.
KINDS = ("v4", "v5e", "v5p", "v6e", "a100-40gb", "a100", "h100", "h200", "b200", "l4", "l40s", "a10g", "a6000", "3090",
         "4090", "t4")  # fmt: skip

_OTHER_NAMES = {
    "rtx3090": "3090",
    "rtx4090": "4090",
    "rtx-4090": "4090",
    "a100-80gb": "a100",
    "a100-sxm4-40": "a100-40gb",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6lite": "v6e",
}

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


Option = bool | int | float | str

_DEFAULTS: dict[str, dict[str, Option]] = {
    "cpu": {},
    "gpu": {},
    "tpu": {
        # Without it, a product whose inputs FSDP splits accumulates partial results of its full output in HBM: the
        # layers of llama2_7b then take 1.7 times as long on 32 v5p.
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
        # Overlap the all-gather of the next weights with the running product, which would wait for them otherwise.
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
        # The same for large all-reduces of gradients: 2.5 % of llama3_8b's step on 256 v5e, for no memory.
        "xla_enable_async_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    },
}
# Defaults that a kind of device has not: the products of a v6e become slower by more than its all-reduces take.
_NOT_FOR = {"v6e": ("xla_enable_async_all_reduce", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce")}

# Signs in XLA's messages of an unknown option or an invalid value.
_REFUSALS = ("No such compile option", "While setting option")


def xla_options(given: Mapping[str, Option | None], platform: str, device_kind: str) -> dict[str, Option]:
    """The options to compile with: defaults of the devices, overridden by `given`; null removes a default."""
    accelerator = find_accelerator(device_kind)
    without = dict.fromkeys(_NOT_FOR.get(accelerator.kind if accelerator else "", ()))
    merged = {**_DEFAULTS[platform], **without, **given}
    return {name: value for name, value in merged.items() if value is not None}


def refused_option(error: Exception) -> UserError | None:
    """The `UserError` to raise if the compiler refused an option; None for any other error."""
    text = str(error)
    if not any(sign in text for sign in _REFUSALS):
        return None
    reason = text.splitlines()[0].partition(": ")[2]
    return UserError(f"trainer.xla_options: invalid XLA option: {reason}; correct or remove it")
