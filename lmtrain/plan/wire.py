"""The bytes that the parallelism of a program requires each device to send, those of experts included."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.compiled.executions import Trips
from lmtrain.compiled.figures import Figures
from lmtrain.lora.model import ADAPTERS, BASE
from lmtrain.models.base_config import Mixture
from lmtrain.models.gated_delta.config import BACKWARD, FORWARD, GatedDeltaMixer
from lmtrain.models.interface import LanguageModel
from lmtrain.models.moe.experts import ROUNDS, rows_of_round
from lmtrain.models.moe.grouped import SCOPE, kernel_of
from lmtrain.models.params import abstract_params, count_parameters, has_copy
from lmtrain.sharding.axes import as_names
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


def delta_flops(program: Program, measured: Figures, step: str, recomputed: str) -> tuple[float, float]:
    """FLOPs of the kernels of linear layers, and the recomputed part of them: by formula, a backward pass twice; those
    of exchanged states do not count."""
    calls = [call for call in measured.kernels if FORWARD in call.op_name or BACKWARD in call.op_name]
    mixers = [mixer for mixer in program.config.model.mixers if isinstance(mixer, GatedDeltaMixer)]
    if not calls or not mixers:
        return 0.0, 0.0
    sequences = program.rows if step == "train" else program.batching.eval_batch // program.layout.num_batch_shards
    heads = program.layout.num_parts("act_heads")
    each = mixers[0].rule_flops * sequences * program.config.model.seq_len / heads
    times = [(call.times * (2 if BACKWARD in call.op_name else 1), recomputed in call.op_name) for call in calls]
    return sum(number for number, _ in times) * each, sum(number for number, again in times if again) * each


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


def wire_minimum(program: Program, step: str) -> float:
    """The minimum number of bytes that a device has to send in a step.

    FSDP over n devices, of data, experts and context, gathers each weight twice for each microbatch, forward and
    backward, and scatters its gradient once, (n - 1) / n of it each time; evaluation gathers once. Weights of products
    in 8 bits are gathered in 8 bits. Gradients of
    embedding tables and of the head are summed in float32, others in the compute dtype. Frozen weights have no
    gradients. Replicas sum their gradients once per step. Tensor parallelism sums activations after attention and after
    the MLP, forward and backward, and once more where the forward pass is recomputed; context parallelism exchanges the
    arrays of attention in each pass. Devices that split experts exchange tokens (`train/program/parts.py`).
    """
    layout, config = program.layout, program.config
    sizes = layout.mesh.shape
    width = jnp.dtype(config.trainer.precision.compute).itemsize
    parts = program.batching.num_microbatches
    microbatches = parts[max(parts)]
    gathered = reduced = 0.0
    for size, names, axes, is_trained, is_8_bit in _parameters(program):
        is_table, of_expert = bool({"vocab", "position"} & names), sizes["expert"] if "expert" in names else 1
        parts_of_state = math.prod(sizes[axis] for axis in ("data", "expert", "context") if axis in axes) // of_expert
        share = (parts_of_state - 1) / parts_of_state
        held = size / of_expert / (sizes["model"] if "model" in axes else 1)
        table = 4 if is_table else width
        scattered = table if is_trained else 0
        each = 1 if is_8_bit else width
        gathered += held * share * (2 * each + scattered) if step == "train" else held * share * width
        if not is_trained:
            continue
        shards = sizes["data"] * sizes["expert"] * sizes["context"]
        copies = sizes["replica"] * (shards if program.config.lora is not None and not share else 1)
        reduced += 2 * (copies - 1) / copies * held / parts_of_state * table
    if step == "eval":
        batch = program.batching.eval_batch
        activations = _tensor_parallel(program, 2, batch) + _context_parallel(program, 1, batch)
        return gathered + activations + exchanged_tokens(program, 2, batch)
    again = int(config.model.gradient_checkpointing in (True, "full", "offload"))
    activations = _tensor_parallel(program, 4 + 2 * again, max(parts)) + _context_parallel(
        program, 2 + again, max(parts)
    )
    activations += exchanged_tokens(program, 5 if config.model.gradient_checkpointing else 4, max(parts))
    return gathered * microbatches + reduced + activations


def _tensor_parallel(program: Program, sums: int, batch: int) -> float:
    size = program.layout.mesh.shape["model"]
    if size == 1 or program.layout.num_parts("act_mlp") == 1:
        return 0.0
    config = program.config
    rows = batch // program.layout.num_batch_shards * config.model.seq_len
    width = jnp.dtype(config.trainer.precision.compute).itemsize
    return sums * config.model.num_layers * 2 * (size - 1) / size * rows * config.model.hidden_dim * width


def _context_parallel(program: Program, passes: int, batch: int) -> float:
    """Bytes that devices exchange because they share sequences, such as queries, keys, values and outputs."""
    model, parts = program.config.model, program.config.trainer.sequence_parts
    if parts == 1:
        return 0.0
    splits = [mixer.split(parts, program.config.trainer.head_parts) for mixer in model.mixers]
    rows = batch // program.layout.num_batch_shards * model.seq_len / parts
    width = jnp.dtype(program.config.trainer.precision.compute).itemsize
    sequences = batch // program.layout.num_batch_shards
    of_positions = rows * width * sum(split.sent for split in splits if split)
    return passes * (of_positions + sequences * sum(split.sent_once for split in splits if split))


def _parameters(program: Program) -> list[tuple[int, set[str], set[str], bool, bool]]:
    """For each parameter: size, the names of its dimensions, the mesh axes that split it, whether it is trained, and
    whether its products in training have 8 bits."""
    has_8_bits = program.config.trainer.precision.products is not None
    rules = dict(program.layout.parameter_rules)
    boxes = jax.tree_util.tree_leaves_with_path(
        abstract_params(program.model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    parameters = []
    for path, box in boxes:
        axes = {axis for name in box.names for axis in as_names(rules.get(name))}
        is_trained = program.config.lora is None or path[0].key == ADAPTERS
        keys = [key.key for key in path if key.key not in (BASE, ADAPTERS)]
        is_8_bit = has_8_bits and has_copy(keys, program.experts_in_8_bits)
        parameters.append((math.prod(box.value.shape), set(box.names), axes, is_trained, is_8_bit))
    return parameters
