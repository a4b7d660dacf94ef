"""The output of `lmtrain plan --json`."""

from typing import Any

from lmtrain.plan.answers import Answer
from lmtrain.plan.report import capacity_of
from lmtrain.plan.request import Request
from lmtrain.runtime.accelerators import Accelerator


def as_json(request: Request, answer: Answer, accelerator: Accelerator | None, fits: bool | None) -> dict[str, Any]:
    """The figures of the training step at the top level, those of the evaluation step under `eval`."""
    estimate = answer.estimate
    topology = request.target.topology
    found: dict[str, Any] = {
        "device": estimate["device"],
        "devices": estimate["devices"],
        "topology": topology.name if topology else "local",
        "mesh": estimate["mesh"],
        "attention": estimate["attention"],
        "parameters": estimate["parameters"],
        "microbatches": estimate["microbatches"],
        "fits": fits,
        "fits_by": None if fits is None else "compiler" if answer.steps else "estimate",
        "failure": answer.failure or None,
    }
    capacity = capacity_of(accelerator)
    steps = {name: _step_json(figures, estimate, capacity) for name, figures in answer.steps.items()}
    if not steps:
        return found | _step_json({"step": request.steps[0]}, estimate, capacity)
    first = next(iter(steps))
    return found | steps[first] | {name: figures for name, figures in steps.items() if name != first}


def _step_json(figures: dict[str, Any], estimate: dict[str, Any], capacity: float | None) -> dict[str, Any]:
    extra = {"capacity": capacity, "estimate": estimate["estimate"]["total"] if figures["step"] == "train" else None}
    unknown = dict.fromkeys(("flops", "hbm_bytes", "wire_bytes", "wire_minimum", "seconds", "mfu_bound"))
    no_memory = dict.fromkeys(("arguments", "peak", "temporary", "total", "host"))
    empty: dict[str, Any] = {"hbm_sources": [], "collectives": [], "loops": [], "kernels": []}
    return {**unknown, **empty, **figures, "memory": {**no_memory, **figures.get("memory", {}), **extra}}
