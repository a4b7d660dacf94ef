"""A trace of some steps of a run: which kernels ran when, on the devices and on the host."""

import os
from typing import Any

import jax

from lmtrain.runtime.logging import log
from lmtrain.train.config import ProfilerConfig


class Profiler:
    """Traces the steps of this start that `config` asks for, into `folder`; none without a config."""

    def __init__(self, config: ProfilerConfig | None, folder: str):
        self._config = config
        self.folder = folder
        self._steps = 0
        self._tracing = False

    def step_begins(self) -> None:
        """Called before each step; a trace that is due begins."""
        self._steps += 1
        if self._config is not None and self._steps == self._config.start_step + 1:
            os.makedirs(self.folder, exist_ok=True)
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self._tracing = True
            log.info(f"profiling {self._config.num_steps} steps into {self.folder}")

    def step_ended(self, metrics: Any) -> bool:
        """Called after each step, with something it gave: whether the trace is complete now. Waits for that step."""
        if not self._tracing or self._config is None:
            return False
        if self._steps < self._config.start_step + self._config.num_steps:
            return False
        jax.block_until_ready(metrics)
        self.close()
        return True

    def close(self) -> None:
        """End a trace that is under way."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        log.info(
            f"profile: {self.folder}; open it with `tensorboard --logdir {self.folder}` (and xprof), or its "
            "perfetto_trace.json.gz at ui.perfetto.dev"
        )
