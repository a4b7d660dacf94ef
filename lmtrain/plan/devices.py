"""JAX's devices for a target: those of a topology that need not be present, or those of this machine."""

from typing import Any

from lmtrain.plan.gpu_targets import target_config
from lmtrain.plan.request import Target
from lmtrain.runtime.topologies import Topology


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
