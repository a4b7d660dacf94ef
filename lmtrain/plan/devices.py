"""JAX's devices for a target: those of a topology that need not be present, or those of this machine.

XLA's compiler for NVIDIA GPUs takes a description of the GPU. Numbers of streaming multiprocessors, clocks, caches and
memory are those of NVIDIA's data sheets and architecture whitepapers (A100, Ada, H100, H200, Blackwell); limits of a
compute capability those of the CUDA programming guide's table "Technical Specifications per Compute Capability".
"""

from dataclasses import dataclass
from typing import Any

from lmtrain.plan.request import Target
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.topologies import Topology

_KIB = 2**10


@dataclass(frozen=True)
class _Capability:
    """Limits of a compute capability. Sizes of shared memory in bytes."""

    major: int
    minor: int
    threads_per_core: int
    lanes_per_core: int
    shared_per_core: int
    shared_per_block: int


_SM80 = _Capability(8, 0, 2048, 64, 164 * _KIB, 163 * _KIB)
_SM89 = _Capability(8, 9, 1536, 128, 100 * _KIB, 99 * _KIB)
_SM90 = _Capability(9, 0, 2048, 128, 228 * _KIB, 227 * _KIB)
_SM100 = _Capability(10, 0, 2048, 128, 228 * _KIB, 227 * _KIB)

# kind -> capability, multiprocessors, clock in GHz, L2 cache in MiB, the driver's name of the device
_GPUS = {
    "a100-40gb": (_SM80, 108, 1.41, 40, "NVIDIA A100-SXM4-40GB"),
    "a100": (_SM80, 108, 1.41, 40, "NVIDIA A100-SXM4-80GB"),
    "l4": (_SM89, 58, 2.04, 48, "NVIDIA L4"),
    "l40s": (_SM89, 142, 2.52, 96, "NVIDIA L40S"),
    "h100": (_SM90, 132, 1.98, 50, "NVIDIA H100 80GB HBM3"),
    "h200": (_SM90, 132, 1.98, 50, "NVIDIA H200"),
    "b200": (_SM100, 148, 1.965, 126, "NVIDIA B200"),
}

_CUDNN = (9, 8, 0)


def open_devices(target: Target, compiles: bool) -> list[Any]:
    """JAX's devices. Without the compiler of their kind, the same number of fake CPU devices."""
    import jax

    topology = target.topology
    if topology is None or not compiles:
        return jax.devices()
    if topology.accelerator.platform == "gpu":
        return _gpus(topology)
    return _tpus(topology)


def _gpus(topology: Topology) -> list[Any]:
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        topology.name,
        "cuda",
        target_config=target_config(topology.accelerator.kind),
        # slices x hosts x devices: hosts of one slice would be joined by NVLink
        topology=f"{topology.slices}x1x{topology.per_slice}",
    )
    return list(description.devices)


def _tpus(topology: Topology) -> list[Any]:
    from jax.experimental import topologies

    kind = topology.accelerator.kind
    shape = "x".join(map(str, topology.shape))
    name = f"{'v5' if kind == 'v5p' else kind}:{shape}"
    options: dict[str, Any] = {"num_slices": topology.slices, "wrap": topology.wrap}
    if len(topology.shape) == 3:
        options["chip_config_name"] = "megacore"  # two cores of a chip are one device
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=topology.host_bounds, **options
    )
    return list(description.devices)


def target_config(kind: str) -> str:
    """The description of a GPU for `jax.experimental.topologies.get_topology_desc(target_config=...)`."""
    capability, cores, clock, cache, name = _GPUS[kind]
    accelerator = ACCELERATORS[kind]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_core: {capability.shared_per_core}
  shared_memory_per_block_optin: {capability.shared_per_block}
  threads_per_core_limit: {capability.threads_per_core}
  core_count: {cores}
  fpus_per_core: {capability.lanes_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(accelerator.memory_bandwidth)}
  l2_cache_size: {cache * _KIB * _KIB}
  clock_rate_ghz: {clock}
  device_memory_size: {accelerator.memory}
  cuda_compute_capability {{ major: {capability.major} minor: {capability.minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
device_description_str: "{name}"
"""
