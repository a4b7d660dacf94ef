"""What `lmtrain plan` estimates of a step's memory beside XLA's own figure for the compiled one, on fake CPU devices.

    .venv/bin/python tools/bench/memory_plan.py

Prints for each case the estimate, XLA's figure (temporary memory, and state, which are compared), and their ratio.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from lmtrain.models.config import ModelConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.run_config import RunConfig
from lmtrain.runtime.progress import format_bytes
from lmtrain.train.program import plan_program

SMALL = Gpt2Config(hidden_dim=768, num_heads=12, num_layers=12, seq_len=1024)
LLAMA = LlamaConfig(hidden_dim=1024, num_heads=16, num_kv_heads=4, num_layers=8, intermediate_dim=2816, seq_len=1024)
TENSOR = {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads", "vocab"]}

CASES: list[tuple[str, ModelConfig, dict[str, object]]] = [
    ("gpt2 124M, recomputing", SMALL, {}),
    ("gpt2 124M, keeping dots", SMALL.model_copy(update={"gradient_checkpointing": "dots"}), {}),
    ("gpt2 124M, keeping all", SMALL.model_copy(update={"gradient_checkpointing": False}), {}),
    ("gpt2 124M, accumulating", SMALL, {"per_device_parallelism": 2}),
    ("gpt2 124M, tensor parallel", SMALL, TENSOR),
    ("llama 8 x 1024, recomputing", LLAMA, {}),
    ("llama 8 x 1024, keeping all", LLAMA.model_copy(update={"gradient_checkpointing": False}), {}),
    ("llama 8 x 1024, blockwise", LLAMA.model_copy(update={"attn_backend": "blockwise"}), {}),
]


def main() -> None:
    for name, model, trainer in CASES:
        config = RunConfig.model_validate({"model": model, "trainer": {"train_batch_size": 32, **trainer}})
        program = plan_program(config, 50257)
        memory = program.memory
        compiled = program.compile().memory_analysis()
        state = sum(memory.state.values())
        figures = [format_bytes(size) for size in (state, memory.total - state, compiled.temp_size_in_bytes)]
        ratio = memory.total / (state + compiled.temp_size_in_bytes)
        print(
            f"{name:<30} state {figures[0]:>10}, work {figures[1]:>10} estimated, {figures[2]:>10} by XLA; "
            f"total {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
