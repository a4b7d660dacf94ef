"""Answers as plain data: figures of a program and of its compiled steps, per device and step."""

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lmtrain.compiled.collectives import Network
from lmtrain.compiled.executions import Trips
from lmtrain.compiled.figures import Figures, bound, measure
from lmtrain.compiled.hlo import Shape
from lmtrain.models.attention.kernel import Kernel, kernel_of
from lmtrain.models.config import ModelConfig
from lmtrain.models.latent.config import LatentMixer
from lmtrain.models.mixer import AttentionMixer
from lmtrain.models.moe.experts import EXPERTS_SCOPE
from lmtrain.models.params import count_parameters
from lmtrain.plan.wire import count_active, delta_flops, describe_experts, expert_flops, expert_trips, wire_minimum
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.sharding.mesh import Layout
from lmtrain.train.program.compile import layout_table
from lmtrain.train.program.program import Program
from lmtrain.train.step.step import OPTIMIZER_SCOPE

# Part of the name of all operations that gradient checkpointing recomputes in the backward pass.
_RECOMPUTED = "rematted_computation"


def describe(program: Program, accelerator: Accelerator | None) -> dict[str, Any]:
    """Figures that need no compiler: sizes, layout, and the memory of the state."""
    config, use = program.config, program.memory_use
    full, causal = program.flops_per_token
    return {
        "model": config.model.type,
        "parameters": count_parameters(program.model),
        "active_parameters": count_active(program.model, config.model.mixture),
        "experts": describe_experts(program),
        "precision": str(config.trainer.precision),
        "seq_len": config.model.seq_len,
        "mesh": dict(program.layout.mesh.shape),
        "replicas": _describe_replicas(program),
        "attention": program.attention.name,
        "attention_reason": program.attention.reason,
        "linear": f"{program.linear.name} ({program.linear.reason})" if program.linear else None,
        "batches": {str(batch): parts for batch, parts in program.batching.num_microbatches.items()},
        "eval_batch": program.batching.eval_batch,
        "batch_shards": program.layout.num_batch_shards,
        "microbatches": use.microbatches,
        "flops_per_token": full,
        "causal_flops_per_token": causal,
        "layout": layout_table(program.model, program.layout, program.abstract.with_base(program.abstract.params)),
        "state": dict(use.state),
        "advice": use.advice(accelerator.memory if accelerator else None),
    }


def _describe_replicas(program: Program) -> str:
    """How many replicas are over slices, with the reason of auto; empty for one slice."""
    number, reason = program.replicas
    return f"{number} over slices or hosts ({reason})" if reason and len(set(program.layout.slice_ids)) > 1 else ""


def compiled_figures(
    program: Program, compiled: Any, text: str, step: str, accelerator: Accelerator | None
) -> dict[str, Any]:
    """Figures of a compiled step, `train` or `eval`, from its HLO text and the compiler's memory analysis."""
    network = network_of(program.layout, accelerator)
    is_logits = functools.partial(_is_logits, program.config.model.hidden_dim)
    measured = measure(text, network, mean_trips(program), is_logits)
    flops = _flops(program, measured, step)
    by_network = {network.fast: 0.0, network.slow: 0.0}
    for collective in measured.collectives:
        by_network[collective.network] += collective.wire_bytes
    by_axes: dict[str, float] = defaultdict(float)
    for collective in measured.collectives:
        if EXPERTS_SCOPE in collective.op_name:
            by_axes["+".join(collective.axes)] += collective.wire_bytes
    figures = {
        "step": step,
        "memory": memory_of(compiled, program.platform),
        "flops": flops,
        "products": _products(measured, flops["experts_by_formula"], flops["experts_in_8_bits"]),
        "cycles": measured.cycles or None,
        "hbm_bytes": measured.hbm_bytes,
        "hbm_minimum": sum(measured.least.values()) + _state_traffic(compiled),
        "hbm_sources": _by_file(measured.traffic, measured.least),
        "wire_bytes": measured.wire_bytes,
        "wire_by_network": by_network,
        "wire_minimum": wire_minimum(program, step),
        "wire_of_experts": dict(by_axes),
        "collectives": _collectives(measured),
        "loops": [
            {"times": loop.times, "total": loop.total, "known": loop.is_known, "where": loop.where}
            for loop in measured.loops
        ],
        "kernels": _kernels(measured),
    }
    if accelerator is None:
        return figures
    seconds = bound(
        flops["compiled"] + flops["attention"],
        measured.hbm_bytes,
        measured.collectives,
        accelerator,
        flops["eight_bit"],
        program.config.trainer.precision.products,
    )
    model_flops = flops["model"] + flops["attention_model"]
    return figures | {
        "seconds": seconds,
        "tokens_per_second": _tokens(program, step) * program.layout.mesh.size / seconds["total"],
        "mfu_bound": model_flops / (seconds["total"] * accelerator.peak_flops),
    }


def _by_file(traffic: Mapping[str, float], least: Mapping[str, float]) -> list[dict[str, Any]]:
    """Bytes by source file, in decreasing order; `least` are those of products, kernels and collectives."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"bytes": 0.0, "least": 0.0})
    for name, sizes in (("bytes", traffic), ("least", least)):
        for where, size in sizes.items():
            files[where.partition(":")[0]][name] += size
    rows = [{"where": where, **sizes} for where, sizes in files.items() if sizes["bytes"]]
    return sorted(rows, key=lambda row: -row["bytes"])


def _is_logits(hidden_dim: int, where: str, shape: Shape) -> bool:
    """Whether an array of a product of the loss is logits or their gradient, which a fused kernel keeps on chip."""
    return where.startswith("objectives/") and hidden_dim not in shape.dims


def _state_traffic(compiled: Any) -> float:
    """Bytes of the program's arguments, each read once, and of its results."""
    stats = compiled.memory_analysis()
    return float(stats.argument_size_in_bytes + stats.output_size_in_bytes)


def network_of(layout: Layout, accelerator: Accelerator | None) -> Network:
    """How the devices of a layout are connected, in the order in which a program numbers them."""
    fast = accelerator.link if accelerator else "local"
    return Network(mesh=dict(layout.mesh.shape), slice_ids=layout.slice_ids, fast=fast, slow="DCN")


def mean_trips(program: Program) -> Trips:
    """Mean trip counts of loops with computed bounds: of attention that skips blocks of keys, of experts' rows."""
    config, kernel = program.config.model, kernel_of(program.attention.name)
    of_experts = expert_trips(program)
    if kernel.mean_trips is None:
        return of_experts
    trainer, size = program.config.trainer, config.flash_attention_block_size
    attentions = [mixer for mixer in config.mixers if isinstance(mixer, AttentionMixer)]
    each = [(mixer.window, mixer.groups(trainer.sequence_parts, trainer.head_parts)) for mixer in attentions]
    count = kernel.mean_trips

    def mean(op_name: str) -> float | None:
        """The text does not say of which layer a loop is: each counts as the mean, so that the sum is right."""
        if kernel.scope not in op_name:
            return of_experts(op_name)
        return sum(count(op_name, config.seq_len, size, window, groups) for window, groups in each) / len(each)

    return mean


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


def _tokens(program: Program, step: str) -> float:
    """Tokens per step and device."""
    batch = max(program.batching.num_microbatches) if step == "train" else program.batching.eval_batch
    return batch * program.config.model.seq_len / program.layout.mesh.size


def backward_flops(config: ModelConfig, kernel: Kernel) -> float:
    """FLOPs of the backward pass of attention, relative to the forward pass, by the widths of keys and of values."""
    total = forward = 0.0
    for mixer in config.all_mixers:
        if isinstance(mixer, AttentionMixer):
            is_latent = isinstance(mixer, LatentMixer) and kernel.latent_flops is not None
            of_keys, of_values = (kernel.latent_flops if is_latent else kernel.flops) or (0, 0)
            own = mixer.flops(config.seq_len, True)[1]
            total += own * (of_keys * mixer.score_share + of_values * (1 - mixer.score_share))
            forward += own
    return total / forward


def _flops(program: Program, measured: Figures, step: str) -> dict[str, float]:
    """FLOPs. `model` and `compiled` count products with parameters; products of attention are counted separately.

    `attention_model` counts attention in full, as `throughput/mfu` does.
    """
    tokens, kernel = _tokens(program, step), kernel_of(program.attention.name)
    full, causal = program.flops_per_token if step == "train" else program.forward_flops_per_token
    scores, causal_scores = program.config.model.attention_flops(full, causal)
    sums = dict.fromkeys(("attention", "sometimes", "optimizer", "recomputed", "other"), 0.0)
    experts, experts_again = expert_flops(program, measured, step, _RECOMPUTED)
    experts_in_8_bits = experts if step == "train" and program.experts_in_8_bits else 0.0
    delta, delta_again = delta_flops(program, measured, step, _RECOMPUTED)
    sums["recomputed"] += experts_again + delta_again
    sums["other"] += experts - experts_again + delta - delta_again
    for product in measured.products:
        parts = {
            "attention": kernel.scope,
            "sometimes": "/cond/",
            "optimizer": OPTIMIZER_SCOPE,
            "recomputed": _RECOMPUTED,
        }
        part = next((part for part, name in parts.items() if name in product.op_name), "other")
        sums[part] += product.flops
    compiled, model = sums.pop("other") + sums["recomputed"], (full - scores) * tokens
    by_formula = 0.0
    calls = [call for call in measured.kernels if kernel.scope in call.op_name]
    if calls and kernel.flops is not None:
        again = any(_RECOMPUTED in call.op_name for call in calls)
        products = causal_scores * tokens / (3 if step == "train" else 1)
        by_formula = products * (1 + again + backward_flops(program.config.model, kernel) if step == "train" else 1)
    return {
        **sums,
        "model": model,
        "compiled": compiled,
        "redundant": max(compiled - sums["recomputed"] - model, 0.0),
        "attention_model": scores * tokens,
        "attention": sums["attention"] + by_formula,
        "attention_is_formula": bool(by_formula),
        "experts_by_formula": experts,
        "experts_in_8_bits": experts_in_8_bits,
        "eight_bit": sum(product.flops for product in measured.products if product.is_8_bit) + experts_in_8_bits,
    }


def _products(measured: Figures, experts: float, experts_in_8_bits: float) -> list[dict[str, Any]]:
    """FLOPs of products by source and operands, in decreasing order."""
    rows: dict[tuple[str, bool], float] = defaultdict(float)
    for product in measured.products:
        rows[product.where, product.is_8_bit] += product.flops
    rows["experts", True] += experts_in_8_bits
    rows["experts", False] += experts - experts_in_8_bits
    found = [{"where": where, "eight_bit": small, "flops": flops} for (where, small), flops in rows.items() if flops]
    return sorted(found, key=lambda row: -row["flops"])


def _collectives(measured: Figures) -> list[dict[str, Any]]:
    """Collectives, grouped by kind and source line, in order of decreasing bytes sent."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for collective in measured.collectives:
        names = ("kind", "devices", "axes", "network", "dtype", "bytes", "asynchronous", "where")
        values = {name: getattr(collective, name) for name in names}
        row = rows.setdefault(tuple(values.values()), {**values, "times": 0.0, "wire_bytes": 0.0})
        row["times"] += collective.times
        row["wire_bytes"] += collective.wire_bytes
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])


def _kernels(measured: Figures) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for call in measured.kernels:
        row = rows.setdefault((call.target, call.where), {"target": call.target, "where": call.where, "times": 0.0})
        row["times"] += call.times
    return list(rows.values())
