"""What any process of a run wishes, known to all at the same step: to save, to stop, or to wait for every step.

One process's wish is granted at once. The wishes of several are a small array that the compiled step takes; it finds
the greatest of each and returns them to every process. So all save after the same step, without a word between the
hosts that the step does not exchange anyway.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.runtime.distributed import gather
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.sharding.mesh import Layout

# How often several processes ask one another, while none of them trains, whether one is to end.
_LOOKS = 16


class Wishes(NamedTuple):
    """`save`: a checkpoint is due by the clock; `stop`: a signal wants the run to end; `wait`: steps are so long that
    the next one is to begin only when this one is finished, as a signal could not end it."""

    save: bool = False
    stop: bool = False
    wait: bool = False

    def __or__(self, other: "Wishes") -> "Wishes":
        return Wishes(*(one or another for one, another in zip(self, other, strict=True)))


class Agreement:
    """Between the processes of a run. `on_devices` and `learn` are called for every step, in turn."""

    def __init__(self, processes: Processes, layout: Layout):
        self._alone = processes.count == 1
        self._sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        self._known = Wishes()
        self._waits = True  # until the first step is known not to be long
        self._saved = 0

    def on_devices(self, mine: Wishes) -> Any:
        """What the next step takes: this process's wishes, [devices, number of wishes], one row a device.

        None for a run of one process.
        """
        if self._alone:
            return None
        local = np.tile(np.array(mine, np.int32), (jax.local_device_count(), 1))
        return jax.make_array_from_process_local_data(self._sharding, local)

    def learn(self, step: int, greatest: Any) -> None:
        """Take the wishes of all, `greatest` [number of wishes], which a step returned; None if it took none."""
        if greatest is None:
            return
        of_step = Wishes(*(bool(wish) for wish in greatest))
        self._known |= Wishes(of_step.save and step > self._saved, of_step.stop)
        self._waits = of_step.wait

    def waits(self, mine: Wishes) -> bool:
        """Whether all wait for the step under way before they begin another."""
        return mine.wait if self._alone else self._waits

    def granted(self, mine: Wishes) -> Wishes:
        """What all do after this step."""
        if self._alone:
            return mine
        known, self._known = self._known, Wishes()
        return known

    def saved(self, step: int) -> None:
        """Wishes to save that came with steps up to this one have been granted."""
        self._saved = step


class StopCheck:
    """For what takes long between two steps: call it again and again, in all processes equally often.

    Raises `StoppedError` in all of them at the same call, if a signal came to one. One process looks each time, several
    at every sixteenth call, through the coordinator.
    """

    def __init__(self, processes: Processes, stop: StopRequest):
        self._processes = processes
        self._stop = stop
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._processes.count > 1 and self._calls % _LOOKS:
            return
        if any(gather(self._processes, "stop", self._stop.requested)):
            raise StoppedError
