"""Profiler traces of some steps of a run: which kernels ran when, on the devices and on the host."""

import os

import jax

from lmtrain.config.counts import counted
from lmtrain.run.trainer import ProfilerConfig
from lmtrain.runtime.logging import log


class Profiler:
    """Writes a trace of the steps that `config` selects, counted from this start, to `folder`; none without a config.

    Errors are logged and do not affect the run.
    """

    def __init__(self, config: ProfilerConfig | None, folder: str):
        self._config = config
        self.folder = folder
        self._steps = 0
        self._tracing = False

    def step_begins(self) -> None:
        """Called before each step; starts the trace when it is due."""
        self._steps += 1
        if self._config is None or self._steps != self._config.start_step + 1:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            # XLA's tracer of Python sets a hook in all threads, and crashes the process if one is just being created
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True, profiler_options=options)
        except Exception as error:  # any error of the disk or the driver
            log.warning(f"profiler: cannot write a trace to {self.folder}: {error}; training continues without it")
            return
        self._tracing = True
        log.info(f"profiling {counted(self._config.num_steps, 'step')} into {self.folder}")

    @property
    def is_last_step(self) -> bool:
        """Whether the trace is complete with the last started step: call `close` when that step is finished."""
        if not self._tracing or self._config is None:
            return False
        return self._steps >= self._config.start_step + self._config.num_steps

    def end(self) -> bool:
        """Like `close`, at the end of a run; logs a warning if the trace never started."""
        if self._config is not None and self._steps <= self._config.start_step:
            log.warning(
                f"profiler: no trace written, as only {counted(self._steps, 'step')} ran after this start and "
                f"start_step is {self._config.start_step}"
            )
        return self.close()

    def close(self) -> bool:
        """Stop the running trace. Returns whether a trace was written."""
        if not self._tracing:
            return False
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            log.warning(f"profiler: the trace could not be written to {self.folder}: {error}; training continues")
            return False
        log.info(
            f"profile: {self.folder}; open it with `tensorboard --logdir {self.folder}` (and xprof), or its "
            "perfetto_trace.json.gz at ui.perfetto.dev"
        )
        return True
