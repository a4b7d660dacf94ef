"""Figures of mixtures of experts: active parameters, rows and FLOPs of grouped products, exchanged tokens."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.compiled.executions import Trips
from lmtrain.compiled.figures import Figures
from lmtrain.models.base_config import Mixture
from lmtrain.models.interface import LanguageModel
from lmtrain.models.moe.experts import ROUNDS, rows_of_round
from lmtrain.models.moe.grouped import SCOPE, kernel_of
from lmtrain.models.params import abstract_params, count_parameters
from lmtrain.train.program.program import Program


def count_active(model: LanguageModel, mixture: Mixture | None) -> int:
    """Number of parameters that a token uses: of the experts, those that the router selects."""
    total = count_parameters(model)
    if mixture is None:
        return total
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    of_experts = sum(math.prod(box.value.shape) for box in boxes if "expert" in box.names)
    return total - of_experts * (mixture.experts - mixture.per_token) // mixture.experts


def describe_experts(program: Program) -> dict[str, Any] | None:
    """The kernel, how experts are split, and the rows of a layer on a device: `rows` for a balanced load, `worst_rows`
    if its experts are selected as often as possible, `rows_in_memory` at once. None for a model without experts."""
    mixture = program.config.model.mixture
    if mixture is None or program.products is None:
        return None
    parts, rows = program.layout.mesh.shape["expert"], _rows(program, "train")
    of_device = mixture.experts // parts
    return {
        "number": mixture.experts,
        "per_token": mixture.per_token,
        "kernel": program.products.name,
        "kernel_reason": program.products.reason,
        "axis": program.expert_parts.described,
        "rows": rows,
        "worst_rows": rows * parts * min(mixture.per_token, of_device) // mixture.per_token,
        "rows_in_memory": rows_of_round(rows * parts, parts),
    }


def expert_trips(program: Program) -> Trips:
    """Mean trip counts of loops over rounds and over tiles, for a balanced load."""
    mixture = program.config.model.mixture
    if mixture is None or program.products is None:
        return lambda op_name: None
    count = kernel_of(program.products.name).mean_trips
    parts = program.layout.mesh.shape["expert"]

    def mean(op_name: str) -> float | None:
        if SCOPE in op_name:
            return None if count is None else count(_rows(program, "train"), mixture.experts // parts)
        return 1.0 if ROUNDS in op_name else None

    return mean


def expert_flops(program: Program, measured: Figures, step: str, recomputed: str) -> tuple[float, float]:
    """FLOPs of the kernels of grouped products, and the recomputed part of them: by formula, with the rows that tiles
    add. 0 where products are counted as compiled."""
    mixture = program.config.model.mixture
    if mixture is None or program.products is None:
        return 0.0, 0.0
    kernel, sizes = kernel_of(program.products.name), program.layout.mesh.shape
    if kernel.mean_trips is not None:
        return 0.0, 0.0
    rows = kernel.rows_computed(_rows(program, step), mixture.experts // sizes["expert"])
    width = mixture.width // program.layout.num_parts("act_mlp")
    each = 2 * rows * program.config.model.hidden_dim * width
    calls = [call for call in measured.kernels if SCOPE in call.op_name]
    times = (sum(call.times for call in calls), sum(call.times for call in calls if recomputed in call.op_name))
    return times[0] * each, times[1] * each


def exchanged_tokens(program: Program, passes: int, batch: int) -> float:
    """Bytes that a device sends in `passes` gathers or scatters of tokens between devices that split the experts."""
    mixture, size = program.config.model.mixture, program.layout.mesh.shape["expert"]
    if mixture is None or size == 1:
        return 0.0
    config = program.config
    tokens = batch * config.model.seq_len / program.layout.num_batch_shards / config.trainer.context_axis_size
    width = jnp.dtype(config.trainer.precision.compute).itemsize
    return passes * len(mixture.layers) * (size - 1) * tokens * config.model.hidden_dim * width


def _rows(program: Program, step: str) -> int:
    """Rows of a layer on a device, in a microbatch and with a balanced load."""
    config, mixture = program.config, program.config.model.mixture
    assert mixture is not None
    sequences = program.rows if step == "train" else program.batching.eval_batch // program.layout.num_batch_shards
    return sequences * config.model.seq_len * mixture.per_token // config.trainer.context_axis_size
