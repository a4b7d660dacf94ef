"""Candidates of `plan --search`: settings that change how a run is executed, not what it learns.

The global batch, `seq_len`, the optimizer and dropout are fixed, and precision unless 8-bit products are allowed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from lmtrain.plan.request import Plan, Request, ask
from lmtrain.run.config import RunConfig
from lmtrain.run.execution import Precision
from lmtrain.runtime.accelerators import SLOW_FORMATS, Accelerator

# They are advised if a step takes at most this share of its time with 16 bits: they round more.
MOST_TIME = 0.92


def format_for(accelerator: Accelerator | None) -> str | None:
    """The 8-bit format to try on a kind of device: fp8 where there is both, since it rounds small numbers less."""
    formats = accelerator.eight_bit if accelerator else {}
    return next((name for name in formats if accelerator and (accelerator.kind, name) not in SLOW_FORMATS), None)


def with_products(precision: Precision, products: str | None) -> str:
    """The setting `mp` of a precision with other products."""
    text = f"p={precision.params},c={precision.compute}"
    return text if products is None else f"{text},q={products}"


def compare(
    request: Request, plan: Plan, timeout: float, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any] | None:
    """The training step's time relative to that with 16-bit products; None without both figures.

    `time` is the ratio of the bounds, on a TPU that of the cycles that its compiler estimates, which include the
    conversions; `pays` says whether 8 bits are advised.
    """
    precision, figures = request.run_config.trainer.precision, plan.steps.get("train", {})
    if precision.products is None or "seconds" not in figures:
        return None
    changes = {"trainer.mp": with_products(precision, None)}
    other = ask(request.changed(changes, steps=("train",)), timeout, progress).steps.get("train", {})
    if "seconds" not in other:
        return None
    bound = figures["seconds"]["total"] / other["seconds"]["total"]
    cycles = figures["cycles"] / other["cycles"] if other["cycles"] else None
    time = bound if cycles is None else cycles
    return {"format": precision.products, "bound": bound, "cycles": cycles, "time": time, "pays": time <= MOST_TIME}


def lines(figures: Mapping[str, Any], comparison: Mapping[str, Any] | None) -> Iterator[str]:
    """Which products have 8 bits, and whether they pay."""
    rows, eight_bit = figures["products"], figures["flops"]["eight_bit"]
    total = sum(row["flops"] for row in rows)
    for is_small, name in ((True, "8 bits"), (False, "16 or more")):
        sources = ", ".join(
            f"{row['flops'] / 1e12:.3g} TFLOP {row['where'] or 'elsewhere'}"
            for row in rows
            if row["eight_bit"] is is_small
        )
        share = eight_bit if is_small else total - eight_bit
        yield f"  {name:<12}{100 * share / total if total else 0:.0f} %: {sources or 'none'}"
    if comparison is not None:
        by = "bound" if comparison["cycles"] is None else "estimate"
        advice = "" if comparison["pays"] else f"; not advised: remove q={comparison['format']} from trainer.mp"
        yield f"  time        {comparison['time']:.2f} x that with products in 16 bits, by the {by}{advice}"


Changes = Mapping[str, Any]

# In order of increasing recomputation in the backward pass.
POLICIES = (False, "dots", "dots_no_kernels", "dots_no_batch", "save_attention", "full", "offload")

# The fewest positions of a sequence on a device, with context parallelism.
_MIN_PART = 2048

# Axes for tensor parallelism: with these, each device computes a part of each product and nothing twice.
TENSOR_AXES = ["mlp", "heads", "vocab"]


def parallelisms(request: Request, changes: Changes | None = None) -> list[int]:
    """Values of `trainer.per_device_parallelism`: divisors of every batch's share of a data shard, largest first."""
    config = request.changed(changes or {}).run_config
    shards = data_shards(request, config)
    shares = [batch // shards for batch in config.trainer.batch_sizes.all if batch % shards == 0]
    common = math.gcd(*shares) if shares else 0
    return [size for size in range(common, 0, -1) if common % size == 0]


def data_shards(request: Request, config: RunConfig) -> int:
    """Number of parts into which a mesh of the target's devices splits the batch."""
    return request.target.num_devices // (config.trainer.model_axis_size * config.trainer.context_axis_size)


def alternatives(request: Request, current: Changes, eight_bit: str | None = None) -> Iterator[tuple[str, Changes]]:
    """Pairs of name and `current` with one setting changed, memory settings first. Some may not divide or not fit.

    With `eight_bit`, also products in this format.
    """
    config = request.changed(current).run_config
    recomputes = "full" if config.model.gradient_checkpointing is True else config.model.gradient_checkpointing
    for policy in POLICIES:
        if policy == "dots_no_kernels":  # equals dots_no_batch where attention is a kernel
            continue
        if policy != recomputes:
            yield f"gradient_checkpointing {policy}".lower(), {**current, "model.gradient_checkpointing": policy}
    if config.model.scan_layers and recomputes is not False:
        # only together: a loop stores all kept values in memory; unrolled, the compiler stores half of them
        unrolled = {"model.gradient_checkpointing": False, "model.scan_layers": False}
        yield "gradient_checkpointing false, scan_layers false", {**current, **unrolled}
    sizes = parallelisms(request, current)
    written = config.trainer.per_device_parallelism
    now = written if written != -1 else max(sizes, default=1)
    smaller = [size for size in sizes if size < now][:1]  # smaller sizes rarely save time: one is enough
    for size in [size for size in sizes if size > now] + smaller:
        yield f"per_device_parallelism {size}", {**current, "trainer.per_device_parallelism": size}
    yield from _meshes(request, config, current)
    if eight_bit:
        yield from _products(config, current, eight_bit)
    other = not config.model.scan_layers
    yield f"scan_layers {other}".lower(), {**current, "model.scan_layers": other}


def _meshes(request: Request, config: RunConfig, current: Changes) -> Iterator[tuple[str, Changes]]:
    topology = request.target.topology
    near = topology.per_slice if topology else request.target.num_devices
    for size in (1, 2, 4, 8):
        if size != config.trainer.model_axis_size and near % size == 0:
            mesh = {"trainer.model_axis_size": size, "trainer.tensor_parallel_axes": TENSOR_AXES if size > 1 else None}
            yield f"model_axis_size {size}", {**current, **mesh}
    for size in (1, 2, 4, 8, 16, 32, 64):
        # shorter parts than this gain nothing
        divides = config.model.seq_len % size == 0 and config.model.seq_len // size >= _MIN_PART
        if size != config.trainer.context_axis_size and divides and request.target.num_devices % size == 0:
            yield f"context_axis_size {size}", {**current, "trainer.context_axis_size": size}
    slices = topology.slices if topology else 1
    now = config.trainer.replica_dcn_axis_size
    for copies in {1, slices}:
        if copies != now and (slices > 1 or now != "auto"):  # auto is 1 with one slice
            yield f"replica_dcn_axis_size {copies}", {**current, "trainer.replica_dcn_axis_size": copies}
    for copies in (1, 2, 4, 8):
        if copies != config.trainer.replica_ici_axis_size and near % (copies * config.trainer.model_axis_size) == 0:
            yield f"replica_ici_axis_size {copies}", {**current, "trainer.replica_ici_axis_size": copies}


def _products(config: RunConfig, current: Changes, eight_bit: str) -> Iterator[tuple[str, Changes]]:
    precision = config.trainer.precision
    for products in (None, eight_bit):
        if products != precision.products and precision.compute != "float32":
            mp = with_products(precision, products)
            yield f"mp {mp}", {**current, "trainer.mp": mp}


def to_yaml(changes: Changes) -> list[str]:
    """YAML lines to paste into a config."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections).splitlines() if sections else []
