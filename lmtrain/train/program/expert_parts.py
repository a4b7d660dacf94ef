"""The choice of `trainer.expert_axis_size: auto`: how many devices split the experts of a mixture.

Bytes that a device sends for a layer, forward and backward, with W bytes of experts in a layer, A bytes of tokens on a
device, n devices of a replica and e of them that split the experts:

    FSDP of the experts, 3 (W / e) (1 - e / n)   two gathers and a scatter of gradients
    exchange of tokens,  5 (e - 1) A             two gathers and a scatter forward, one of each backward

Between slices, the devices of one share the bytes. So e does not change what the slow network sends, but what the fast
one does; products hide both if they take longer. A larger e computes the same products with more memory traffic.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from lmtrain.config.errors import UserError
from lmtrain.models.base_config import Mixture
from lmtrain.run.batching import choose_batching
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.sharding.mesh import configured_expert_parts, slices_of


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
