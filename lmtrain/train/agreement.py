"""What any process of a run wishes, known to all at the same step: to save, or to stop.

One process's wish is granted at once. The wishes of several travel as a small array with the batch; the compiled step
finds the greatest, and its metrics bring it back to every process a step later. So all save the same step, without a
word between the hosts that the step does not exchange anyway.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.runtime.processes import Processes
from lmtrain.sharding.mesh import Layout

# The name of the wishes in a batch, and in the metrics of its step.
WISHES = "wishes"
_SAVE, _STOP = 1, 2


class Wishes(NamedTuple):
    """`save`: a checkpoint is due by the clock; `stop`: a signal wants the run to end."""

    save: bool = False
    stop: bool = False


class Agreement:
    """Between the processes of a run. `with_batch` and `learn` are called for every step, in turn."""

    def __init__(self, processes: Processes, layout: Layout):
        self._alone = processes.count == 1
        self._sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        self._known = Wishes()
        self._saved = 0

    def with_batch(self, batch: dict[str, Any], mine: Wishes) -> dict[str, Any]:
        """The batch of the next step, with this process's wishes."""
        if self._alone:
            return batch
        value = _SAVE * mine.save + _STOP * mine.stop
        local = np.full(jax.local_device_count(), value, np.int32)
        return batch | {WISHES: jax.make_array_from_process_local_data(self._sharding, local)}

    def learn(self, step: int, metrics: dict[str, float]) -> None:
        """Take the wishes of all from the metrics of a step, where they are."""
        greatest = int(metrics.pop(WISHES, 0))
        save = bool(greatest & _SAVE) and step > self._saved
        self._known = Wishes(save or self._known.save, bool(greatest & _STOP) or self._known.stop)

    def granted(self, mine: Wishes) -> Wishes:
        """What all do after this step."""
        if self._alone:
            return mine
        known, self._known = self._known, Wishes()
        return known

    def saved(self, step: int) -> None:
        """Wishes to save that came with steps up to this one have been granted."""
        self._saved = step
