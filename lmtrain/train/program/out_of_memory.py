"""A device without enough memory: what the training state uses of it, and which settings to change."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from lmtrain.config.describe import written
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.progress import format_bytes


class OutOfMemoryError(RunError):
    """A device has not enough memory for the run; the message lists what uses it and which settings to change."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What is known of a step's memory without compiling it, per device.

    `state` has the bytes of each part of the training state. `rows` sequences are computed at once, in `microbatches`
    per step.
    """

    config: RunConfig
    mesh: Mapping[str, int]
    rows: int
    microbatches: int
    state: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of the training state."""
        return sum(self.state.values())

    def check_fits(self) -> None:
        """Raise `UserError` with advice if the training state alone is larger than a device's memory."""
        memory = device_memory(jax.local_devices()[0])
        if memory is not None and self.total > memory:
            sizes = f"{format_bytes(self.total)} on each device, which has {format_bytes(memory)}"
            raise UserError(self.explain(f"the training state needs {sizes}", memory))

    def explain(self, error: str, capacity: int | None) -> str:
        """The first line of an error, the memory of the state, the settings, and what to change."""
        config, trainer, plural = self.config, self.config.trainer, "es" if self.microbatches > 1 else ""
        lines = [
            f"out of memory: {error.splitlines()[0]}",
            f"the training state needs {format_bytes(self.total)} on each device: "
            + ", ".join(f"{name} {format_bytes(size)}" for name, size in self.state.items()),
            f"current settings: {self.rows} sequences of {config.model.seq_len} tokens at once on each part of the "
            f"mesh, {self.microbatches} microbatch{plural}, gradient_checkpointing "
            f"{written(config.model.gradient_checkpointing)}, mp {trainer.mp}, mesh {dict(self.mesh)}, "
            f"parameters split by fsdp_axis {written(trainer.fsdp_axis)}",
            "what to change, the most effective first:",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self.advice(capacity))])

    def advice(self, capacity: float | None) -> list[str]:
        """Settings to change for a step that does not fit into `capacity` bytes, the most effective first.

        Those of the state come first if it needs more than half of the memory, otherwise those of activations.
        """
        state, activations = self._of_state(), self._of_activations()
        is_state = capacity is not None and self.total > capacity / 2
        shorter = f"model.seq_len: {self.config.model.seq_len // 2} halves activations; changes the model"
        return [*(state + activations if is_state else activations + state), shorter]

    def _of_activations(self) -> list[str]:
        lines = []
        if self.config.model.gradient_checkpointing not in (True, "full", "offload"):
            lines.append(
                "model.gradient_checkpointing: true recomputes each block instead of storing its activations; same "
                "result"
            )
        if self.rows > 1:
            lines.append(
                f"trainer.per_device_parallelism: {self.rows // 2} accumulates over more microbatches; same result"
            )
        lines.append(
            "trainer.model_axis_size: 2 or more with tensor_parallel_axes: [mlp, heads, vocab] splits each block; same "
            "result"
        )
        return lines

    def _of_state(self) -> list[str]:
        config, precision = self.config, self.config.trainer.precision
        if self.mesh["data"] > 1 and config.trainer.fsdp_axis:
            lines = ["more devices: each then holds a smaller part of parameters and optimizer state; same result"]
        else:
            lines = [
                "trainer.fsdp_axis: embed splits parameters and optimizer state over the devices, if there are "
                "several; same result"
            ]
        if config.base_dtype == "float32":
            lines.append(
                "lora.base_dtype: bfloat16 stores the frozen base in half the memory; lower precision of its weights"
            )
        if config.optimizer.moments > 1:
            lines.append(
                "optimizer.type: lion stores half of Adam's moments, adafactor almost none; changes training dynamics"
            )
        if precision.params != precision.compute:
            lines.append(
                "trainer.mp: bf16 stores parameters and first moments in bfloat16, not float32; lower precision"
            )
        return lines


def device_memory(device: Any) -> int | None:
    """The memory of a device in bytes; of a CPU device, its share of the machine's; None if unknown."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    limit: int | None = (device.memory_stats() or {}).get("bytes_limit")
    return limit
