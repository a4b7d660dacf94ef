"""Advice on device memory: what uses it, and which settings to change if a run does not fit. Used by `lmtrain plan`
and for out-of-memory errors."""

from lmtrain.config.describe import written
from lmtrain.models.config import ModelConfig
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program.memory import Memory, largest_arrays, plan_memory
from lmtrain.train.program.program import Program


def estimate_memory(program: Program) -> Memory:
    """The estimated memory of the training step on each device."""
    config = program.config
    return plan_memory(
        config.model,
        config.lora,
        program.model,
        program.layout,
        program.abstract,
        program.shardings,
        program.state_bytes,
        compute_dtype=config.trainer.precision.compute,
        rows=program.rows,
        accumulates=max(program.batching.num_microbatches.values()) > 1,
        inputs=config.batch_types,
        optimizer=config.optimizer.type,
        hessian=config.optimizer.hessian,
        platform=program.platform,
    )


def advice_for(program: Program) -> list[str]:
    """Settings to change for a step that does not fit, the most effective first."""
    fsdp = program.layout.mesh.shape["data"] > 1 and bool(program.config.trainer.fsdp_axis)
    return advise(estimate_memory(program), program.config.model, program.rows, fsdp)


def explain_out_of_memory(program: Program, error: str) -> str:
    """The first line of an error, the estimated use of memory, and what to change."""
    memory, trainer, model = estimate_memory(program), program.config.trainer, program.config.model
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in {**memory.state, **memory.work}.items())
    biggest = largest_arrays(program.abstract.in_memory, program.shardings.in_memory)
    arrays = ", ".join(f"{name} {format_bytes(size)}" for name, size in biggest)
    microbatches = max(program.batching.num_microbatches.values())
    lines = [
        f"out of memory: {error.splitlines()[0]}",
        f"about {format_bytes(memory.total)} on each device: {parts}",
        f"largest arrays of the state: {arrays}",
        f"current settings: {program.rows} sequences of {model.seq_len} tokens at once on each part of the mesh, "
        f"{microbatches} microbatch{'es' if microbatches > 1 else ''}, gradient_checkpointing "
        f"{written(model.gradient_checkpointing)}, mp {trainer.mp}, mesh {dict(program.layout.mesh.shape)}, "
        f"parameters split by fsdp_axis {written(trainer.fsdp_axis)}",
        "what to change, the most effective first:",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in advice_for(program))])


def advise(memory: Memory, config: ModelConfig, rows: int, is_split: bool) -> list[str]:
    """Suggested changes of settings, sorted by the bytes they affect.

    `is_split`: FSDP already splits the state over several devices.
    """
    sizes = {"saved activations": 0, "one block's activations": 0, "base": 0, **memory.state, **memory.work}
    saved = sizes["saved activations"] + sizes["one block's activations"]
    options = [
        (
            saved + 1,  # before the next one, which costs more time
            config.gradient_checkpointing not in (True, "full", "offload"),
            "model.gradient_checkpointing: true recomputes each block instead of storing its activations; same result",
        ),
        (
            saved,
            rows > 1,
            f"trainer.per_device_parallelism: {max(rows // 2, 1)} accumulates over more microbatches; same result",
        ),
        (
            sizes["base"] // 2,
            "copy of the base" in sizes,
            "lora.base_dtype: bfloat16 stores the frozen base in half the memory; lower precision of its weights",
        ),
        (
            sizes["optimizer"] + sizes["params"] + sizes["base"],
            not is_split,
            "trainer.fsdp_axis: embed splits parameters and optimizer state over the devices, if there are several; "
            "same result",
        ),
        (
            sizes["optimizer"] + sizes["params"] + sizes["base"],
            is_split,
            "more devices: each then holds a smaller part of parameters and optimizer state; same result",
        ),
        (
            sizes["one block's activations"],
            True,
            "trainer.model_axis_size: 2 or more with tensor_parallel_axes: [mlp, heads, vocab] splits each block; same "
            "result",
        ),
        (
            sizes["optimizer"] // 2,
            True,
            "optimizer.type: lion stores half of Adam's moments, adafactor almost none; changes training dynamics",
        ),
        (
            sizes["params"] // 2,
            "copy of the parameters" in sizes,
            "trainer.mp: bf16 stores parameters and moments in bfloat16, not float32; lower precision",
        ),
        (saved // 2, True, f"model.seq_len: {config.seq_len // 2} halves activations; changes the model"),
    ]
    return [text for _, applies, text in sorted(options, key=lambda option: -option[0]) if applies]
