"""A plan as text and as JSON: model, layout, memory, FLOPs, communication, and the bound on speed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lmtrain.plan import candidates
from lmtrain.plan.candidates import to_yaml
from lmtrain.plan.request import Plan, Target
from lmtrain.plan.search import Search
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.axes import used_axes

# An allocator cannot use all memory: fragments, kernels' workspace, the driver. XLA:TPU's compiler accounts for these.
USABLE_OF_GPU = 0.92

_BAR_WIDTH = 40
_ROWS = 12


def capacity_of(accelerator: Accelerator | None) -> float | None:
    """Bytes that a program can use on a device."""
    if accelerator is None:
        return None
    return accelerator.memory * (1.0 if accelerator.platform == "tpu" else USABLE_OF_GPU)


def plan_lines(
    plan: Plan,
    accelerator: Accelerator | None,
    target: Target,
    vocabulary: str,
    comparison: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The complete text of a plan, up to its verdict. `comparison`: see `lmtrain/plan/candidates.py`."""
    program, topology = plan.program, target.topology
    kind = accelerator.name if accelerator else program["device"]
    shape = f" ({topology.name})" if topology and topology.num_devices > 1 else ""
    yield from model_lines(program, f"{program['devices']} x {kind}{shape}", vocabulary)
    yield ""
    yield "memory of the training state per device"
    for name, size in {**program["state"], "total": plan.state_bytes}.items():
        yield f"  {name:<26}{format_bytes(size):>12}"
    for figures in plan.steps.values():
        yield from step_lines(figures, accelerator)
    training = plan.steps.get("train", {})
    if comparison is not None or training.get("flops", {}).get("eight_bit"):
        yield ""
        yield "products in 8 bits"
        yield from candidates.lines(training, comparison)
    yield ""
    yield verdict(plan, accelerator)


def as_json(plan: Plan, accelerator: Accelerator | None, target: Target) -> dict[str, Any]:
    """The figures of the first step at the top level, those of the evaluation step under `eval`."""
    topology, capacity = target.topology, capacity_of(accelerator)
    fits = plan.fits(capacity)
    names = ("device", "devices", "mesh", "attention", "parameters", "microbatches")
    steps = {name: _step_json(figures, plan, capacity) for name, figures in plan.steps.items()}
    first = next(iter(steps), None)
    return {
        **{name: plan.program[name] for name in names},
        "topology": topology.name if topology else "local",
        "fits": fits,
        "fits_by": None if fits is None else "compiler" if steps else "state",
        "failure": plan.failure or None,
        **(_step_json({}, plan, capacity) if first is None else steps[first]),
        **{name: figures for name, figures in steps.items() if name != first},
    }


def _step_json(figures: dict[str, Any], plan: Plan, capacity: float | None) -> dict[str, Any]:
    unknown = dict.fromkeys(("flops", "hbm_bytes", "hbm_minimum", "wire_bytes", "wire_minimum", "seconds", "mfu_bound"))
    empty: dict[str, Any] = {"hbm_sources": [], "collectives": [], "loops": [], "kernels": []}
    memory = dict.fromkeys(("arguments", "peak", "temporary", "total", "host")) | figures.get("memory", {})
    return {**unknown, **empty, **figures, "memory": {**memory, "capacity": capacity, "state": plan.state_bytes}}


def model_lines(program: Mapping[str, Any], device: str, vocabulary: str) -> Iterator[str]:
    """Model, devices, batch and the table of parameters."""
    mesh = " x ".join(f"{name} {size}" for name, size in used_axes(program["mesh"]).items())
    active = "" if program["experts"] is None else f", {program['active_parameters']:,} of them active"
    yield f"model       {program['model']}, {program['parameters']:,} parameters{active}"
    yield f"vocabulary  {vocabulary}"
    yield f"precision   {program['precision']}"
    yield f"devices     {device}: {mesh}"
    if program["replicas"]:
        yield f"replicas    {program['replicas']}"
    yield f"attention   {program['attention']} ({program['attention_reason']})"
    if program["linear"]:
        yield f"linear      {program['linear']}"
    if experts := program["experts"]:
        yield (
            f"experts     {experts['per_token']} of {experts['number']} per token, {experts['kernel']} "
            f"({experts['kernel_reason']}), expert_axis_size {experts['axis']}"
        )
        yield (
            f"            rows per layer and device: {experts['rows']:,} with a balanced load, "
            f"{experts['worst_rows']:,} at worst, {experts['rows_in_memory']:,} in memory for any load"
        )
    for batch, parts in program["batches"].items():
        each = int(batch) // program["batch_shards"]
        micro = f", in {parts} microbatches of {each // parts}" if parts > 1 else ""
        yield f"batch       {batch} sequences of {program['seq_len']} tokens, {each} per data shard{micro}"
        flops = program["flops_per_token"] * int(batch) * program["seq_len"]
        yield f"FLOPs       {flops:.3g} per step"
    full, causal = program["flops_per_token"], program["causal_flops_per_token"]
    yield f"            {full:.4g} per token, forward and backward; {causal:.4g} with causal attention counted as half"
    yield ""
    yield "parameters, how they are split, and bytes per device"
    yield from (f"  {line}" for line in program["layout"])


def step_lines(figures: Mapping[str, Any], accelerator: Accelerator | None) -> Iterator[str]:
    """All figures of a compiled step."""
    name = {"train": "training", "eval": "evaluation"}[figures["step"]]
    yield ""
    if "does_not_fit" in figures:
        yield f"{name} step: does not fit, refused by the compiler"
        lines = [line.strip() for line in figures["does_not_fit"].splitlines() if line.strip()]
        yield from (f"  {line[:200]}" for line in lines[:3])
        return
    yield f"{name} step as compiled, per device"
    yield from memory_lines(figures, accelerator)
    yield from _work_lines(figures)
    yield from _collective_lines(figures)
    yield from _loop_lines(figures)
    if accelerator is not None:
        yield from _bound_lines(figures, accelerator)


def memory_lines(figures: Mapping[str, Any], accelerator: Accelerator | None) -> Iterator[str]:
    """The memory of a compiled step as figures and a bar."""
    memory = figures["memory"]
    capacity = capacity_of(accelerator)
    fragments = " with fragments" if accelerator is not None and accelerator.platform == "tpu" else ""
    yield (
        f"  memory      arguments {format_bytes(memory['arguments'])}, live peak {format_bytes(memory['peak'])}, "
        f"temporary buffers {format_bytes(memory['temporary'])}{fragments}"
        + (f", in host memory {format_bytes(memory['host'])}" if memory["host"] else "")
    )
    if capacity is not None and accelerator is not None:
        share = memory["peak"] / capacity
        yield f"              [{_bar(memory, capacity)}] {100 * share:.0f} % of {format_bytes(capacity)}"
        yield "              # arguments, + rest of the peak, . free"


def _bar(memory: Mapping[str, float], capacity: float) -> str:
    filled = min(round(_BAR_WIDTH * memory["peak"] / capacity), _BAR_WIDTH)
    arguments = min(round(_BAR_WIDTH * memory["arguments"] / capacity), filled)
    return "#" * arguments + "+" * (filled - arguments) + "." * (_BAR_WIDTH - filled)


def _work_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    flops = figures["flops"]
    ratio = flops["compiled"] / flops["model"] if flops["model"] else 0.0
    parts = [f"{_flops(flops[name])} {text}" for name, text in (
        ("recomputed", "recomputed"), ("redundant", "redundant"), ("optimizer", "in the optimizer"),
        ("sometimes", "in some steps only"),
    ) if flops[name] > 0.001 * flops["compiled"]]  # fmt: skip
    yield (
        f"  products    {_flops(flops['compiled'])}, {ratio:.2f} x the {_flops(flops['model'])} of the model"
        f"{'; ' + ', '.join(parts) if parts else ''}"
    )
    by = "by formula" if flops["attention_is_formula"] else "as compiled"
    kernels = ", ".join(f"{call['times']:.0f} x {call['target']}" for call in figures["kernels"])
    yield (
        f"  attention   {_flops(flops['attention'])} {by}; {_flops(flops['attention_model'])} in the model, full "
        f"attention{f' ({kernels})' if kernels else ''}"
    )
    if flops["experts_by_formula"]:
        yield f"  experts     {_flops(flops['experts_by_formula'])} of the products by formula, with the rows of tiles"
    least, moved = figures["hbm_minimum"], figures["hbm_bytes"]
    ratio = f", {moved / least:.2f} x the minimum of {_decimal(least)}" if least else ""
    yield f"  HBM         {_decimal(moved)} read and written{ratio}"
    for row in figures["hbm_sources"][:4]:
        share = f", minimum {_decimal(row['least'])}" if row["least"] else ""
        yield f"              {_decimal(row['bytes'])} {row['where'] or 'elsewhere'}{share}"


def _collective_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    least, sent = figures["wire_minimum"], figures["wire_bytes"]
    ratio = f", {sent / least:.2f} x the minimum of {_decimal(least)}" if least else ""
    networks = ", ".join(f"{_decimal(size)} {name}" for name, size in figures["wire_by_network"].items() if size)
    yield f"  wire        {_decimal(sent)} sent{f' ({networks})' if networks else ''}{ratio}"
    if figures["wire_of_experts"]:
        by_axes = ", ".join(f"{_decimal(size)} over {axes}" for axes, size in figures["wire_of_experts"].items())
        yield f"  experts     {by_axes} of the bytes sent"
    rows = figures["collectives"]
    if not rows:
        yield "              no collectives"
        return
    heads = f"{'collective':<19}{'over':<13}{'network':<8}{'array':>13} {'times':>7} {'sent':>9}"
    yield f"    {heads}  {'overlap':<8}source"
    for row in rows[:_ROWS]:
        over = "+".join(row["axes"]) or "some"
        array = f"{row['dtype']} {_decimal(row['bytes'])}"
        yield (
            f"    {row['kind']:<19}{over:<13}{row['network']:<8}{array:>13} {row['times']:>7.0f} "
            f"{_decimal(row['wire_bytes']):>9}  {'yes' if row['asynchronous'] else 'no':<8}{row['where'] or 'unknown'}"
        )
    if len(rows) > _ROWS:
        rest = sum(row["wire_bytes"] for row in rows[_ROWS:])
        yield f"    and {len(rows) - _ROWS} more, {_decimal(rest)} together (--json lists all)"


def _loop_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    label = "loops"
    for loop in figures["loops"]:
        guess = "" if loop["known"] else "?"
        mean = "" if float(loop["times"]).is_integer() else " (on average)"
        yield f"  {label:<12}{loop['times']:,.4g}{guess} x {loop['where'] or 'unknown'}{mean}"
        label = ""


def _bound_lines(figures: Mapping[str, Any], accelerator: Accelerator) -> Iterator[str]:
    seconds = figures["seconds"]
    yield (
        f"  bound       {_seconds(seconds['total'])} per step at best on {accelerator.name}, limited by "
        f"{ {'products': 'products', 'hbm': 'HBM', 'wire': 'communication'}[seconds['limited_by']] }: products "
        f"{_seconds(seconds['products'])}, HBM {_seconds(seconds['hbm'])}, wire {_seconds(seconds['wire'])} "
        f"({_seconds(seconds['wire_synchronous'])} not overlapped)"
    )
    yield (
        f"              {figures['tokens_per_second']:,.0f} tokens/s and {100 * figures['mfu_bound']:.1f} % MFU at most"
    )


def verdict(plan: Plan, accelerator: Accelerator | None) -> str:
    """Whether it fits, in one line."""
    if accelerator is None:
        return "unknown whether it fits: add a kind of device, such as --device h100"
    capacity = capacity_of(accelerator) or 0
    of = f"{format_bytes(capacity)} of {accelerator.name}"
    if plan.is_refused:
        return f"does not fit into {of} (by the compiler)"
    need, by = (max(plan.peaks), "by the compiler") if plan.peaks else (plan.state_bytes, "by the training state alone")
    if need > capacity:
        return f"does not fit: {format_bytes(need)}, {need / capacity:.3g} times {of} ({by})"
    if plan.peaks:
        return f"fits: {format_bytes(need)} of {of} ({by})"
    return f"unknown whether it fits: the training state needs {format_bytes(need)} of {of}, and a step needs more"


def advice_lines(plan: Plan, smaller: Search | None) -> Iterator[str]:
    """What to change in a run that does not fit: the largest setting that does, if one was found, and general advice.

    `smaller` is the search for that setting; None if nothing was compiled.
    """
    name = "trainer.per_device_parallelism"
    largest = None if smaller is None else smaller.best
    if largest is not None:
        yield f"largest that fits ({largest.peak / 2**30:.2f} GiB by the compiler): {largest.name}"
        yield from (f"  {line}" for line in to_yaml(largest.changes))
    elif smaller is not None:
        yield "no value of per_device_parallelism and gradient_checkpointing fits these devices; use more devices"
    yield "what to reduce, most effective first:"
    yield from (f"  {line}" for line in plan.program["advice"] if largest is None or not line.startswith(name))


def search_lines(search: Search) -> Iterator[str]:
    """The settings that a search found, as YAML with comments."""
    best = search.best
    if best is None:
        tried = f"{len(search.trials)} tried, {search.too_large} with too large a state"
        yield f"no settings fit: {tried}; use more devices"
        return
    memory = f"{best.peak / 2**30:.2f} GiB per device"
    yield f"# best of {len(search.trials)} tried: {best.seconds:.4g} s per step, {memory}"
    yield f"# {search.too_large} had too large a state, {search.untried} were not tried before the time limit"
    yield from to_yaml(best.changes) or ["# the config unchanged"]


def search_json(search: Search) -> dict[str, Any]:
    """The best settings and all trials of a search; null for the time and memory of a trial that was refused."""
    trials = [
        {**asdict(trial), **({} if trial.seconds < math.inf else {"seconds": None, "peak": None})}
        for trial in search.trials
    ]
    best = None if search.best is None else dict(search.best.changes)
    return {"best": best, "trials": trials, "too_large": search.too_large, "untried": search.untried}


def _flops(number: float) -> str:
    return _scaled(number, 4, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _decimal(size: float) -> str:
    """A size in decimal units, like bandwidths."""
    return _scaled(size, 3, ("B", "kB", "MB", "GB", "TB"))


def _scaled(number: float, digits: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.{digits}g} {unit}"
        number /= 1000
    return f"{number:,.{digits}g} {units[-1]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
