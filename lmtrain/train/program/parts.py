"""Choices of a program that depend on its devices: parts of experts, replicas, the teacher's model.

Bytes that a device sends for a layer, forward and backward, with W bytes of experts in a layer, A bytes of tokens on a
device, n devices of a replica and e of them that split the experts:

    FSDP of the experts, 3 (W / e) (1 - e / n)   two gathers and a scatter of gradients
    exchange of tokens,  5 (e - 1) A             two gathers and a scatter forward, one of each backward

Between slices, the devices of one share the bytes. So e does not change what the slow network sends, but what the fast
one does; products hide both if they take longer. A larger e computes the same products with more memory traffic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from lmtrain.hf.weight_files import read_model_config
from lmtrain.models.attention.kernel import choose_attention
from lmtrain.models.base_config import Mixture
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.registry import build_model
from lmtrain.objectives.config import DistillConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.trainer import choose_batching
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import Layout, build_layout, configured_expert_parts, configured_replicas, slices_of
from lmtrain.weights.hf_config import config_of


class ExpertParts(NamedTuple):
    """The number of devices that split experts, and the reason for the log; no reason if it is configured."""

    number: int
    reason: str = ""

    @property
    def described(self) -> str:
        return f"{self.number}" + (f" ({self.reason})" if self.reason else "")


def choose_expert_parts(
    config: RunConfig,
    devices: Sequence[Any],
    slice_ids: Sequence[int] | None,
    replicas: int,
    accelerator: Accelerator | None,
) -> ExpertParts:
    """Raises `UserError` for a configured number and a model without experts."""
    trainer, mixture = config.trainer, config.model.mixture
    configured = configured_expert_parts(trainer)
    if mixture is None and (configured or 1) > 1:
        raise UserError(
            f"trainer.expert_axis_size: {configured}: the model has no mixture of experts (model.moe); remove it"
        )
    if configured is not None or mixture is None:
        return ExpertParts(configured or 1)
    slices = len(set(slice_ids or slices_of(devices))) // replicas
    if slices <= 1:
        return ExpertParts(1, "one slice or host has all parameters")
    if accelerator is None:
        return ExpertParts(1, "the networks of the devices are unknown")
    within = trainer.model_axis_size * trainer.context_axis_size
    parts = len(devices) // (replicas * trainer.replica_ici_axis_size * within)
    if parts % slices:
        return ExpertParts(1, "experts are split within a slice or host")
    costs = _costs(config, mixture, parts, slices, len(devices) // within, accelerator)
    fsdp = costs.seconds[1]
    if fsdp <= costs.products:
        return ExpertParts(
            1,
            f"FSDP sends experts in {1e3 * fsdp:.3g} ms per layer, hidden by {1e3 * costs.products:.3g} ms of products",
        )
    best = min(costs.seconds, key=lambda number: costs.seconds[number])
    return ExpertParts(
        best, f"{1e3 * costs.seconds[best]:.3g} ms of communication per layer, {1e3 * fsdp:.3g} with FSDP"
    )


class _Costs(NamedTuple):
    """Seconds of a layer: of communication by the number of devices that split experts, and of products."""

    seconds: dict[int, float]
    products: float


def _costs(
    config: RunConfig, mixture: Mixture, parts: int, slices: int, shards: int, accelerator: Accelerator
) -> _Costs:
    """`parts` devices of a replica split data and experts, `shards` all devices that split the batch."""
    trainer, model = config.trainer, config.model
    width = jnp.dtype(trainer.precision.compute).itemsize
    batching = choose_batching(trainer, shards)
    sequences = max(batch // shards // number for batch, number in batching.num_microbatches.items())
    tokens = sequences * model.seq_len / trainer.context_axis_size
    matrices = 3 * model.hidden_dim * mixture.width / trainer.model_axis_size
    weights, activations = matrices * mixture.experts * width, tokens * model.hidden_dim * width
    in_slice = parts // slices
    seconds = {}
    for number in range(1, in_slice + 1):
        if in_slice % number == 0 and mixture.experts % number == 0:
            fast = 3 * weights / number * (1 - number / in_slice) + 5 * (number - 1) * activations
            slow = 3 * weights / in_slice * (1 - 1 / slices)
            seconds[number] = fast / accelerator.link_bandwidth + slow / accelerator.dcn_bandwidth
    products = 3 * 2 * tokens * mixture.per_token * matrices / accelerator.peak_flops
    return _Costs(seconds, products)


# The choice of `trainer.replica_dcn_axis_size: auto`: one replica per slice or host of GPUs, or FSDP across all.
#
# Replicas send only gradients over the slow network, once per step; FSDP across sends parameters too, for each
# microbatch, but a device has a smaller part of the state.

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


# Settings of the student that are about execution, and the length of sequences, hold for the teacher, too.
_SHARED = ("seq_len", "attn_backend", "flash_attention_block_size", "pad_vocab_to_multiple_of", "scan_layers")


@dataclass(frozen=True)
class Teacher:
    """The teacher `ref`, a folder or hub id. Its head has as many rows as that of the student."""

    ref: str
    config: ModelConfig
    model: LanguageModel


def build_teacher(config: RunConfig, vocab_size: int, platform: str, device_kind: str) -> Teacher | None:
    """The teacher of a run on devices of this kind; None without one.

    Raises `UserError` for one with a shorter context or a smaller vocabulary.
    """
    if not isinstance(config.objective, DistillConfig):
        return None
    ref, length = config.objective.teacher, config.model.seq_len
    with errors_of("objective.teacher"):
        theirs = config_of(ref).model
        tokens = read_model_config(ref).get("vocab_size")
        if theirs.seq_len < length:
            raise UserError(f"{ref} has a context of {theirs.seq_len:,} tokens, but model.seq_len is {length:,}")
        if isinstance(tokens, int) and tokens < vocab_size:
            raise UserError(
                f"{ref} has {tokens:,} tokens, but the run's tokenizer {vocab_size:,}; both must be the same"
            )
    own = {name: getattr(config.model, name) for name in _SHARED}
    theirs = theirs.model_copy(update=own | {"gradient_checkpointing": False})
    needs = config.model_copy(update={"model": theirs}).attention_needs(trains=False)
    attention = choose_attention(needs, platform, device_kind)
    return Teacher(ref, theirs, build_model(theirs, vocab_size, attention.name))
