"""Whether products in 8 bits (q of trainer.mp) make a run faster: its step compiled with and without them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmtrain.plan.answers import Plan, ask
from lmtrain.plan.request import Request
from lmtrain.run.precision import Precision
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
