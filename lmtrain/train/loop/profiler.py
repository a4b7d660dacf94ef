"""A trace of some steps of a run: which kernels ran when, on the devices and on the host."""

import os

import jax

from lmtrain.run.trainer import ProfilerConfig
from lmtrain.runtime.logging import log


class Profiler:
    """Traces the steps of this start that `config` asks for, into `folder`; none without a config.

    What goes wrong is told, and costs the run nothing but the trace.
    """

    def __init__(self, config: ProfilerConfig | None, folder: str):
        self._config = config
        self.folder = folder
        self._steps = 0
        self._tracing = False
        self._begun = False

    def step_begins(self) -> None:
        """Called before each step; a trace that is due begins."""
        self._steps += 1
        if self._config is None or self._steps != self._config.start_step + 1:
            return
        self._begun = True
        try:
            os.makedirs(self.folder, exist_ok=True)
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
        except Exception as error:  # whatever a disk or a driver has against it
            log.warning(f"profiler: no trace can be made into {self.folder}: {error}; training continues without it")
            return
        self._tracing = True
        log.info(f"profiling {self._config.num_steps} steps into {self.folder}")

    @property
    def is_last_step(self) -> bool:
        """Whether the trace is complete with the step that was begun last: `close` it once that is finished."""
        if not self._tracing or self._config is None:
            return False
        return self._steps >= self._config.start_step + self._config.num_steps

    def end(self) -> bool:
        """At the end of a run: as `close`, and a trace that never began is told."""
        if self._config is not None and not self._begun:
            log.warning(
                f"profiler: no trace, as this start made {self._steps} steps and start_step is "
                f"{self._config.start_step}"
            )
        return self.close()

    def close(self) -> bool:
        """End a trace that is under way. Whether there is one now."""
        if not self._tracing:
            return False
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            log.warning(f"profiler: the trace could not be written into {self.folder}: {error}; training continues")
            return False
        log.info(
            f"profile: {self.folder}; open it with `tensorboard --logdir {self.folder}` (and xprof), or its "
            "perfetto_trace.json.gz at ui.perfetto.dev"
        )
        return True
