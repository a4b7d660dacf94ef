"""Where the memory of a device goes, and what to turn down when a run does not fit: for `lmtrain plan`, and for a run
that has run out of it."""

from lmtrain.config.describe import written
from lmtrain.models.config import ModelConfig
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program.memory import Memory, largest_arrays, plan_memory
from lmtrain.train.program.program import Program


def estimate_memory(program: Program) -> Memory:
    """What the training step takes on each device, estimated."""
    config = program.config
    return plan_memory(
        config.model,
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
    """What to turn down for a step that does not fit, what helps most first."""
    fsdp = program.layout.mesh.shape["data"] > 1 and bool(program.config.trainer.fsdp_axis)
    return advise(estimate_memory(program), program.config.model, program.rows, fsdp)


def explain_out_of_memory(program: Program, error: str) -> str:
    """The first line of an error, where the memory goes, and what to change."""
    memory, trainer, model = estimate_memory(program), program.config.trainer, program.config.model
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in {**memory.state, **memory.work}.items())
    biggest = largest_arrays(program.abstract.parts, program.shardings.parts)
    arrays = ", ".join(f"{name} {format_bytes(size)}" for name, size in biggest)
    microbatches = max(program.batching.num_microbatches.values())
    lines = [
        f"out of memory: {error.splitlines()[0]}",
        f"about {format_bytes(memory.total)} on each device: {parts}",
        f"biggest arrays that lie there: {arrays}",
        f"now: {program.rows} sequences of {model.seq_len} tokens at once on each part of the mesh, "
        f"{microbatches} microbatch{'es' if microbatches > 1 else ''}, gradient_checkpointing "
        f"{written(model.gradient_checkpointing)}, mp {trainer.mp}, mesh {dict(program.layout.mesh.shape)}, "
        f"parameters split by fsdp_axis {written(trainer.fsdp_axis)}",
        "what to change, what helps most first:",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in advice_for(program))])


def advise(memory: Memory, config: ModelConfig, rows: int, is_split: bool) -> list[str]:
    """Changes of settings, what acts on most bytes first.

    `is_split` says that FSDP splits the state over several devices already.
    """
    sizes = {"saved activations": 0, "one block's activations": 0, **memory.state, **memory.work}
    saved = sizes["saved activations"] + sizes["one block's activations"]
    options = [
        (
            saved + 1,  # before the next one, which costs more time
            config.gradient_checkpointing not in (True, "full", "offload"),
            "model.gradient_checkpointing: true recomputes each block instead of keeping its values; same result",
        ),
        (
            saved,
            rows > 1,
            f"trainer.per_device_parallelism: {max(rows // 2, 1)} accumulates over more microbatches; same result",
        ),
        (
            sizes["optimizer"] + sizes["params"],
            not is_split,
            "trainer.fsdp_axis: embed, with several devices, splits parameters and optimizer state over them; "
            "same result",
        ),
        (
            sizes["optimizer"] + sizes["params"],
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
            "optimizer.type: lion keeps half of Adam's moments, adafactor hardly any; changes training dynamics",
        ),
        (
            sizes["params"] // 2,
            "copy of the parameters" in sizes,
            "trainer.mp: bf16 keeps no float32 parameters and moments; lower precision",
        ),
        (saved // 2, True, f"model.seq_len: {config.seq_len // 2} halves activations; changes the model"),
    ]
    return [text for _, applies, text in sorted(options, key=lambda option: -option[0]) if applies]
