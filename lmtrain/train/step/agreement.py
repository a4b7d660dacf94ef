"""Agreement of a run's processes on when to save, to stop, or to wait for each step.

The request of a single process is granted at once. With several processes, the requests are a small array that is an
input of the compiled step; the step computes the maximum of each and returns it to every process. All of them therefore
save after the same step, without communication between hosts beyond what the step exchanges anyway.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.runtime.processes import Processes
from lmtrain.sharding.mesh import Layout


class Requests(NamedTuple):
    """Requests of a process. `save`: a checkpoint is due by the clock; `stop`: a signal requests the end of the run;
    `wait`: steps are long, so the next one starts only when this one is finished, since a signal cannot interrupt it.
    """

    save: bool = False
    stop: bool = False
    wait: bool = False

    def __or__(self, other: "Requests") -> "Requests":
        return Requests(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


class Agreement:
    """Agreement between the processes of a run. Call `on_devices` and then `learn` for every step."""

    def __init__(self, processes: Processes, layout: Layout):
        self._alone = processes.count == 1
        self._sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        self._known = Requests()
        self._waits = True  # until the first step is known not to be long
        self._saved = 0

    def on_devices(self, mine: Requests) -> Any:
        """The next step's input: this process's requests, [devices, number of requests], one row per device.

        None for a run of one process.
        """
        if self._alone:
            return None
        local = np.tile(np.array(mine, np.int32), (jax.local_device_count(), 1))
        return jax.make_array_from_process_local_data(self._sharding, local)

    def learn(self, step: int, greatest: Any) -> None:
        """Record the requests of all processes: `greatest` [number of requests], as a step returned it, or None."""
        if greatest is None:
            return
        of_step = Requests(*(bool(request) for request in greatest))
        self._known |= Requests(of_step.save and step > self._saved, of_step.stop)
        self._waits = of_step.wait

    def waits(self, mine: Requests) -> bool:
        """Whether all processes wait for the running step before they start the next one."""
        return mine.wait if self._alone else self._waits

    def granted(self, mine: Requests) -> Requests:
        """The requests that all processes fulfil after this step."""
        if self._alone:
            return mine
        known, self._known = self._known, Requests()
        return known

    def saved(self, step: int) -> None:
        """Mark the save requests of steps up to this one as fulfilled."""
        self._saved = step
