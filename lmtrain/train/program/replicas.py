"""The choice of `trainer.replica_dcn_axis_size: auto`: one replica per slice or host of GPUs, or FSDP across all.

Replicas send only gradients over the slow network, once per step; FSDP across sends parameters too, for each
microbatch, but a device has a smaller part of the state.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import Layout, build_layout, configured_expert_parts, configured_replicas, slices_of

# A slice gets a replica if its state takes at most this part of the memory. Gradients grow with the state, so that a
# larger one costs a quarter of the memory; as compiled, models of 7 B and more on hosts of 8 H100s gain nothing by it.
_PART_OF_MEMORY = 1 / 10


class Replicas(NamedTuple):
    """The number of replicas over slices, and the reason for the log; no reason if it is configured."""

    number: int
    reason: str = ""


def choose_replicas(
    config: PartitioningConfig,
    devices: Sequence[Any],
    slice_ids: Sequence[int] | None,
    state_bytes: Callable[[Layout], int],
    memory: float | None,
) -> Replicas:
    """The number of replicas for a state of `state_bytes` per device in a layout, and devices with `memory` bytes."""
    slices = len(set(slice_ids or slices_of(devices)))
    configured = configured_replicas(config, slices)
    if configured is not None:
        return Replicas(configured)
    if slices == 1:
        return Replicas(1, "one slice or host")
    within = config.replica_ici_axis_size * config.context_axis_size * config.model_axis_size
    within *= configured_expert_parts(config) or 1
    if len(devices) // slices % within:
        return Replicas(1, f"a model on {within} devices needs several slices or hosts")
    if memory is None:
        return Replicas(1, "the memory of the devices is unknown")
    if config.context_axis_size > 1:
        return Replicas(1, "with context parallelism, memory is for activations")
    each = state_bytes(build_layout(config, devices, slice_ids, slices))
    of_memory = f"{format_bytes(each)} of {format_bytes(memory)} per device"
    if each > _PART_OF_MEMORY * memory:
        return Replicas(1, f"the state of a replica in each slice or host takes {of_memory}")
    return Replicas(slices, f"one in each slice or host, whose state takes {of_memory}")
