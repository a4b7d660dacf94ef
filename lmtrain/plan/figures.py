"""Answers as plain data: figures of the estimate and of the compiled program, per device and step."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.compiled.bound import bound
from lmtrain.compiled.collectives import Collective, Network
from lmtrain.compiled.executions import Trips
from lmtrain.compiled.figures import Figures, measure
from lmtrain.compiled.hlo import Frame
from lmtrain.lora.model import ADAPTERS
from lmtrain.models.flops import attention_flops
from lmtrain.models.layers.blockwise import mean_blocks
from lmtrain.models.params import abstract_params, count_parameters
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.sharding.axes import as_names
from lmtrain.sharding.mesh import Layout
from lmtrain.train.program.advice import advice_for, estimate_memory
from lmtrain.train.program.layout_table import layout_table
from lmtrain.train.program.program import Program, attention_choice

# The products of attention (scores, weighted values) are in these files; all others are products with parameters.
_ATTENTION = tuple(f"models/layers/{name}" for name in ("attention.py", "blockwise.py", "splash.py", "triton/"))

# FLOPs of attention kernels, backward relative to forward. Kernels compute only the causal half: 2 products forward, 5
# backward, or 7 if the gradients of queries and of keys have separate kernels, which compute 2 of them twice.
_BACKWARD_OVER_FORWARD = {"cudnn": 2.5, "splash": 3.5, "triton": 3.5}


def describe(program: Program, platform: str) -> dict[str, Any]:
    """Figures that need no compiler: sizes, layout, and the memory estimate."""
    config = program.config
    name, why = attention_choice(config, platform)
    full, causal = program.flops_per_token
    memory = estimate_memory(program)
    return {
        "model": config.model.type,
        "parameters": count_parameters(program.model),
        "precision": str(config.trainer.precision),
        "seq_len": config.model.seq_len,
        "mesh": dict(program.layout.mesh.shape),
        "attention": name,
        "attention_reason": why,
        "batches": {str(batch): parts for batch, parts in program.batching.num_microbatches.items()},
        "eval_batch": program.batching.eval_batch,
        "batch_shards": program.layout.num_batch_shards,
        "microbatches": max(program.batching.num_microbatches.values()),
        "flops_per_token": full,
        "causal_flops_per_token": causal,
        "layout": layout_table(program.model, program.layout, config.trainer.precision.params, config.base_dtype),
        "estimate": {"state": dict(memory.state), "work": dict(memory.work), "total": memory.total},
        "advice": advice_for(program),
    }


def compiled_figures(
    program: Program, compiled: Any, text: str, step: str, accelerator: Accelerator | None
) -> dict[str, Any]:
    """Figures of a compiled step, `train` or `eval`, from its HLO text and the compiler's memory analysis."""
    layout = program.layout
    network = network_of(layout, accelerator)
    found = measure(text, network, mean_trips(program))
    flops = _flops(program, found, step)
    fast, slow = (_wire_by(found, network_name) for network_name in (network.fast, network.slow))
    answer = {
        "step": step,
        "memory": memory_of(compiled, program.platform),
        "flops": flops,
        "hbm_bytes": found.hbm_bytes,
        "hbm_sources": _by_file(found.traffic),
        "wire_bytes": found.wire_bytes,
        "wire_by_network": {network.fast: fast, network.slow: slow},
        "wire_minimum": wire_minimum(program, step),
        "collectives": _collectives(found),
        "loops": [
            {"times": loop.times, "total": loop.total, "known": loop.is_known, "where": where}
            for loop, where in zip(found.loops, found.loop_places, strict=True)
        ],
        "kernels": _kernels(found),
    }
    if accelerator is None:
        return answer
    seconds = bound(flops["compiled"] + flops["attention"], found.hbm_bytes, found.collectives, accelerator)
    total = seconds["total"]
    model_flops = flops["model"] + flops["attention_model"]
    tokens = _tokens(program, step)
    return answer | {
        "seconds": seconds,
        "tokens_per_second": tokens * layout.mesh.size / total,
        "mfu_bound": model_flops / (total * accelerator.peak_flops),
    }


def _by_file(traffic: Mapping[str, float]) -> list[dict[str, Any]]:
    """Bytes by source file, in decreasing order."""
    files: dict[str, float] = defaultdict(float)
    for place, size in traffic.items():
        files[place.partition(":")[0]] += size
    return [{"where": where, "bytes": size} for where, size in sorted(files.items(), key=lambda one: -one[1]) if size]


def network_of(layout: Layout, accelerator: Accelerator | None) -> Network:
    """How the devices of a layout are connected, in the order in which a program numbers them."""
    fast = accelerator.link if accelerator else "local"
    return Network(dict(layout.mesh.shape), layout.islands, fast, "DCN")


def mean_trips(program: Program) -> Trips:
    """Mean trip counts of loops with computed bounds: those of blockwise attention, which skip future blocks."""
    config = program.config.model
    window = getattr(config, "sliding_window", None)
    mean = mean_blocks(config.seq_len, config.flash_attention_block_size, window)

    def trips(stack: list[Frame]) -> float | None:
        inner = next((frame.file for frame in stack if "lmtrain/" in frame.file), "")
        return mean if inner.endswith("models/layers/blockwise.py") else None

    return trips


def memory_of(compiled: Any, platform: str) -> dict[str, float]:
    """Bytes by the compiler's memory analysis: arguments, peak of live buffers, temporary buffers.

    The peak is the size of buffers that are alive at the same time, without fragmentation, which on a TPU is part of
    the temporary buffers. XLA:GPU includes the host's buffers, and XLA:CPU excludes temporary ones.
    """
    stats = compiled.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = kept + stats.temp_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0) or total
    peak = {"tpu": peak, "gpu": min(peak, total)}.get(platform, total)
    return {
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "peak": max(peak, stats.argument_size_in_bytes),
        "total": total,
        "host": stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
    }


def wire_minimum(program: Program, step: str) -> float:
    """The minimum number of bytes that a device has to send in a step.

    FSDP over n devices gathers each weight twice for each microbatch, forward and backward, and scatters its gradient
    once, (n - 1) / n of it each time; evaluation gathers once. Gradients of embedding tables and of the head are
    summed in float32, others in the compute dtype. Frozen weights have no gradients. Replicas sum their gradients once
    per step. Tensor parallelism sums activations after attention and after the MLP, forward and backward, and once more
    where the forward pass is recomputed.
    """
    layout, config = program.layout, program.config
    sizes = layout.mesh.shape
    width = jnp.dtype(config.trainer.precision.compute).itemsize
    parts = program.batching.num_microbatches
    microbatches = parts[max(parts)]
    gathered = reduced = 0.0
    for size, is_table, axes, is_trained in _parameters(program):
        share = (sizes["data"] - 1) / sizes["data"] if "data" in axes else 0.0
        held = size / (sizes["model"] if "model" in axes else 1)
        table = 4 if is_table else width
        scattered = table if is_trained else 0
        gathered += held * share * (2 * width + scattered) if step == "train" else held * share * width
        if not is_trained:
            continue
        copies = sizes["replica"] * (sizes["data"] if program.config.lora is not None and not share else 1)
        reduced += 2 * (copies - 1) / copies * held / (sizes["data"] if share else 1) * table
    if step == "eval":
        return gathered + _tensor_parallel(program, 2, program.batching.eval_batch)
    again = 2 if config.model.gradient_checkpointing in (True, "full", "offload") else 0
    return gathered * microbatches + reduced + _tensor_parallel(program, 4 + again, max(parts))


def _tensor_parallel(program: Program, sums: int, batch: int) -> float:
    size = program.layout.mesh.shape["model"]
    if size == 1 or program.layout.num_parts("act_mlp") == 1:
        return 0.0
    config = program.config
    rows = batch // program.layout.num_batch_shards * config.model.seq_len
    width = jnp.dtype(config.trainer.precision.compute).itemsize
    return sums * config.model.num_layers * 2 * (size - 1) / size * rows * config.model.hidden_dim * width


def _parameters(program: Program) -> list[tuple[int, bool, set[str], bool]]:
    """For each parameter: size, whether it is an embedding table or the head, the mesh axes that split it, and whether
    it is trained."""
    rules = dict(program.layout.parameter_rules)
    boxes = jax.tree_util.tree_leaves_with_path(
        abstract_params(program.model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    found = []
    for path, box in boxes:
        axes = {axis for name in box.names for axis in as_names(rules.get(name))}
        is_trained = program.config.lora is None or path[0].key == ADAPTERS
        found.append((math.prod(box.value.shape), bool({"vocab", "position"} & set(box.names)), axes, is_trained))
    return found


def _tokens(program: Program, step: str) -> float:
    """Tokens per step and device."""
    batch = max(program.batching.num_microbatches) if step == "train" else program.batching.eval_batch
    return batch * program.config.model.seq_len / program.layout.mesh.size


def _flops(program: Program, found: Figures, step: str) -> dict[str, float]:
    """FLOPs. `model` and `compiled` count products with parameters; products of attention are counted separately.

    `attention_model` counts attention in full, as `throughput/mfu` does.
    """
    tokens = _tokens(program, step)
    full, causal = program.flops_per_token if step == "train" else program.forward_flops_per_token
    scores, causal_scores = attention_flops(program.config.model, full, causal)
    weights = [product for product in found.products if not product.where.startswith(_ATTENTION)]
    attention = sum(product.flops for product in found.products) - sum(product.flops for product in weights)
    optimizer = sum(product.flops for product in weights if product.where.startswith("optim/"))
    sometimes = sum(product.flops for product in weights if "/cond/" in product.op_name)
    recomputed = sum(product.flops for product in weights if product.is_recomputed and "/cond/" not in product.op_name)
    compiled = sum(product.flops for product in weights) - optimizer - sometimes
    model = (full - scores) * tokens
    kernels = 0.0
    if found.kernels and not attention:
        forward = causal_scores * tokens / (3 if step == "train" else 1)
        again = any("rematted_computation" in kernel.op_name for kernel in found.kernels)
        backward = _BACKWARD_OVER_FORWARD[program.attention]
        kernels = forward * ((2 if again else 1) + backward if step == "train" else 1)
    return {
        "model": model,
        "compiled": compiled,
        "recomputed": recomputed,
        "redundant": max(compiled - recomputed - model, 0.0),
        "optimizer": optimizer,
        "sometimes": sometimes,
        "attention_model": scores * tokens,
        "attention": attention + kernels,
        "attention_is_formula": bool(kernels),
    }


def _wire_by(found: Figures, network: str) -> float:
    return sum(one.wire_bytes for one in found.collectives if one.network == network)


def _collectives(found: Figures) -> list[dict[str, Any]]:
    """Collectives, grouped by kind and source line, in order of decreasing bytes sent."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one, where in zip(found.collectives, found.places, strict=True):
        key = (one.kind, one.devices, one.axes, one.network, one.dtype, one.bytes, one.asynchronous, where)
        row = rows.setdefault(key, _row(one, where))
        row["times"] += one.times
        row["wire_bytes"] += one.wire_bytes
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])


def _row(one: Collective, where: str) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "devices": one.devices,
        "axes": list(one.axes),
        "network": one.network,
        "dtype": one.dtype,
        "bytes": one.bytes,
        "times": 0.0,
        "wire_bytes": 0.0,
        "asynchronous": one.asynchronous,
        "where": where,
    }


def _kernels(found: Figures) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in found.kernels:
        row = rows.setdefault((one.target, one.where), {"target": one.target, "where": one.where, "times": 0.0})
        row["times"] += one.times
    return list(rows.values())
