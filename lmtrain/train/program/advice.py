"""What to turn down when a run does not fit into the memory of its devices."""

from lmtrain.models.config import ModelConfig
from lmtrain.train.program.memory import Memory


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
            "optimizer.type: lion keeps half of Adam's moments, adafactor hardly any; learns otherwise",
        ),
        (
            sizes["params"] // 2,
            "copy of the parameters" in sizes,
            "trainer.mp: bf16 keeps no float32 parameters and moments; less exact",
        ),
        (saved // 2, True, f"model.seq_len: {config.seq_len // 2} halves activations; another model"),
    ]
    return [text for _, applies, text in sorted(options, key=lambda option: -option[0]) if applies]
