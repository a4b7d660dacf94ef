"""The text of a plan: model, layout, memory, FLOPs, communication, and the bound on speed."""

from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.plan.answers import Answer
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.runtime.progress import format_bytes

# An allocator cannot use all memory: fragments, kernels' workspace, the driver. XLA:TPU's compiler accounts for these.
USABLE_OF_GPU = 0.92

_BAR_WIDTH = 40
_ROWS = 12


def capacity_of(accelerator: Accelerator | None) -> float | None:
    """Bytes that a program can use on a device."""
    if accelerator is None:
        return None
    return accelerator.memory * (1.0 if accelerator.platform == "tpu" else USABLE_OF_GPU)


def model_lines(estimate: Mapping[str, Any], device: str, vocabulary: str) -> Iterator[str]:
    """Model, devices, batch and the table of parameters."""
    mesh = " x ".join(f"{name} {size}" for name, size in estimate["mesh"].items())
    yield f"model       {estimate['model']}, {estimate['parameters']:,} parameters"
    yield f"vocabulary  {vocabulary}"
    yield f"precision   {estimate['precision']}"
    yield f"devices     {device}: {mesh}"
    yield f"attention   {estimate['attention']} ({estimate['attention_reason']})"
    for batch, parts in estimate["batches"].items():
        each = int(batch) // estimate["batch_shards"]
        micro = f", in {parts} microbatches of {each // parts}" if parts > 1 else ""
        yield f"batch       {batch} sequences of {estimate['seq_len']} tokens, {each} per data shard{micro}"
        flops = estimate["flops_per_token"] * int(batch) * estimate["seq_len"]
        yield f"FLOPs       {flops:.3g} per step"
    full, causal = estimate["flops_per_token"], estimate["causal_flops_per_token"]
    yield f"            {full:.4g} per token, forward and backward; {causal:.4g} with causal attention counted as half"
    yield ""
    yield "parameters, how they are split, and bytes per device"
    yield from (f"  {line}" for line in estimate["layout"])


def estimate_lines(estimate: Mapping[str, Any]) -> Iterator[str]:
    """The memory estimate, part by part."""
    parts = estimate["estimate"]
    yield "memory per device, estimated"
    for name, size in parts["state"].items():
        yield f"  {name:<26}{format_bytes(size):>12}   exact"
    for name, size in parts["work"].items():
        yield f"  {name:<26}{format_bytes(size):>12}   temporary"
    yield f"  {'total':<26}{format_bytes(parts['total']):>12}"


def step_lines(
    figures: Mapping[str, Any], estimate: Mapping[str, Any], accelerator: Accelerator | None
) -> Iterator[str]:
    """All figures of a compiled step."""
    name = {"train": "training", "eval": "evaluation"}[figures["step"]]
    yield ""
    if "does_not_fit" in figures:
        yield f"{name} step: does not fit, refused by the compiler"
        yield from (f"  {line}" for line in _refusal(figures["does_not_fit"]))
        return
    yield f"{name} step as compiled, per device"
    yield from memory_lines(figures, estimate, accelerator)
    yield from _work_lines(figures)
    yield from _collective_lines(figures)
    yield from _loop_lines(figures)
    if accelerator is not None:
        yield from _bound_lines(figures, accelerator)


def _refusal(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line[:200] for line in lines[:3]]


def memory_lines(
    figures: Mapping[str, Any], estimate: Mapping[str, Any], accelerator: Accelerator | None
) -> Iterator[str]:
    """The memory of a compiled step as figures and a bar."""
    memory = figures["memory"]
    capacity = capacity_of(accelerator)
    yield (
        f"  memory      arguments {format_bytes(memory['arguments'])}, live peak {format_bytes(memory['peak'])}, "
        f"temporary buffers {format_bytes(memory['temporary'])}{_fragments(accelerator)}"
        + (f", in host memory {format_bytes(memory['host'])}" if memory["host"] else "")
    )
    if figures["step"] == "train":
        yield f"              estimated {format_bytes(estimate['estimate']['total'])}"
    if capacity is not None and accelerator is not None:
        share = memory["peak"] / capacity
        yield f"              [{_bar(memory, capacity)}] {100 * share:.0f} % of {format_bytes(capacity)}"
        yield "              # arguments, + rest of the peak, . free"


def _fragments(accelerator: Accelerator | None) -> str:
    return " with fragments" if accelerator is not None and accelerator.platform == "tpu" else ""


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
    kernels = ", ".join(f"{one['times']:.0f} x {one['target']}" for one in figures["kernels"])
    yield (
        f"  attention   {_flops(flops['attention'])} {by}; {_flops(flops['attention_model'])} in the model, full "
        f"attention{f' ({kernels})' if kernels else ''}"
    )
    sources = ", ".join(f"{_decimal(row['bytes'])} {row['where'] or 'elsewhere'}" for row in figures["hbm_sources"][:4])
    yield f"  HBM         {_decimal(figures['hbm_bytes'])} read and written: {sources}"


def _collective_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    least, sent = figures["wire_minimum"], figures["wire_bytes"]
    ratio = f", {sent / least:.2f} x the minimum of {_decimal(least)}" if least else ""
    networks = ", ".join(f"{_decimal(size)} {name}" for name, size in figures["wire_by_network"].items() if size)
    yield f"  wire        {_decimal(sent)} sent{f' ({networks})' if networks else ''}{ratio}"
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


def verdict(answer: Answer, accelerator: Accelerator | None) -> str:
    """Whether it fits, in one line."""
    capacity = capacity_of(accelerator)
    fits = answer.fits(capacity)
    if fits is None:
        return "unknown whether it fits: add a kind of device, such as --device h100"
    assert accelerator is not None
    peaks = [step["memory"]["peak"] for step in answer.steps.values() if "memory" in step]
    by = "by the compiler" if answer.steps else "by the estimate"
    need = max(peaks) if peaks else answer.estimate["estimate"]["total"]
    of = f"{format_bytes(capacity or 0)} of {accelerator.name}"
    if fits:
        return f"fits: {format_bytes(need)} of {of} ({by})"
    if any("does_not_fit" in step for step in answer.steps.values()):
        return f"does not fit into {of} ({by})"
    return f"does not fit: {format_bytes(need)}, {need / (capacity or 1):.3g} times {of} ({by})"


def _flops(number: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if number < 1000:
            return f"{number:.4g} {unit}FLOP"
        number /= 1000
    return f"{number:,.4g} PFLOP"


def _decimal(size: float) -> str:
    """A size in decimal units, like bandwidths."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
